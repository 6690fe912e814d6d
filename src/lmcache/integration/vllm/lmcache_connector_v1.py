"""`LMCacheConnectorV1Dynamic`: the connector, configured as LMCache inside an engine, with a server of its own.

"kv_connector": "LMCacheConnectorV1Dynamic",
"kv_connector_module_path": "lmcache.integration.vllm.lmcache_connector_v1"
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lmcache.integration.engine.server_order import private_order
from lmcache.integration.in_process.server_variables import server_environment
from lmcache.integration.in_process.translation import translate
from lmcache.integration.vllm.connector import LMCacheMPConnector
from lmcache.integration.vllm.settings import ConnectorSettings, private_server_options, without_autostart

log = logging.getLogger("lmcache.vllm")

_PREFIX, _CONNECTOR = "lmcache.", "lmcache.mp."
_HOST, _PORT = "lmcache.mp.host", "lmcache.mp.port"
_REPLICA = re.compile(r"_dp\d+$")  # what vLLM adds to the engine id of a data-parallel replica


class LMCacheConnectorV1Dynamic(LMCacheMPConnector):
    """Where keys name a server (`mp_host`, `lmcache.mp.host`) that one is used. Otherwise the engine starts one that no
    other engine reaches; data-parallel replicas share it."""

    def _read_settings(self, extra: Mapping[str, Any]) -> ConnectorSettings:
        return in_process_settings(extra, os.environ, self._instance_id)


def in_process_settings(extra: Mapping[str, Any], environ: Mapping[str, str], engine_id: str) -> ConnectorSettings:
    """ConfigError names each key that is refused, and what to use instead."""
    translation = translate(extra, environ)
    for sentence in translation.idle:
        log.warning("%s", sentence)
    own = {key: value for key, value in extra.items() if not key.startswith(_PREFIX) or key.startswith(_CONNECTOR)}
    connector = {**translation.connector, **own}
    if _HOST in connector or _PORT in connector:
        settings = ConnectorSettings.read(connector)
        if translation.of_server:
            log.warning("%s: no effect, as the server at %s decides", ", ".join(translation.of_server), settings.url)
        return settings
    name = hashlib.sha256(_REPLICA.sub("", engine_id).encode()).hexdigest()[:16]
    options = [*translation.options, *private_server_options(connector)]
    order = private_order(name, options, server_environment(environ, options, translation))
    settings = ConnectorSettings.read(without_autostart(connector), has_own_server=True)
    return replace(settings, url=order.url, autostart=order)
