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
from lmcache.integration.in_process.translation import adapters_variable, translate
from lmcache.integration.vllm.connector import LMCacheMPConnector
from lmcache.integration.vllm.settings import ConnectorSettings
from lmcache.telemetry.logs import LEVEL_VARIABLE

log = logging.getLogger("lmcache.vllm")

_PREFIX, _CONNECTOR = "lmcache.", "lmcache.mp."
_HOST, _PORT = "lmcache.mp.host", "lmcache.mp.port"
_PASSED = (LEVEL_VARIABLE, "LMCACHE_ADMIN_TOKEN", "LMCACHE_RESP_")
_REPLICA = re.compile(r"_dp\d+$")  # what vLLM adds to the engine id of a data-parallel replica


class LMCacheConnectorV1Dynamic(LMCacheMPConnector):
    """Where keys name a server (`mp_host`, `lmcache.mp.host`) that one is used. Otherwise the engine starts one that no
    other engine reaches; data-parallel replicas share it."""

    def _read_settings(self, extra: Mapping[str, Any]) -> ConnectorSettings:
        return in_process_settings(extra, os.environ, self._instance_id)


def in_process_settings(extra: Mapping[str, Any], environ: Mapping[str, str], engine_id: str) -> ConnectorSettings:
    """ConfigError names each key that is refused, and what to use instead."""
    translation = translate(extra, environ)
    own = {key: value for key, value in extra.items() if not key.startswith(_PREFIX) or key.startswith(_CONNECTOR)}
    connector = {**translation.connector, **own}
    settings = ConnectorSettings.read(connector)
    if _HOST in connector or _PORT in connector:
        if translation.of_server:
            log.warning("%s: no effect, as the server at %s decides", ", ".join(translation.of_server), settings.url)
        return settings
    name = hashlib.sha256(_REPLICA.sub("", engine_id).encode()).hexdigest()[:16]
    # What the variables say is translated; those with secrets, and the level of the log, a server reads by itself.
    kept = {key: value for key, value in environ.items() if not key.startswith("LMCACHE_") or key.startswith(_PASSED)}
    order = private_order(name, translation.options, {**kept, **adapters_variable(translation.adapters)})
    return replace(settings, url=order.url, autostart=order)
