"""The environment of a server that an engine starts for itself: what its own variables say, and what was translated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.config.load import CONFIG_VARIABLE, draft, file_sources, is_of_kubernetes
from lmcache.config.spec import options as server_options
from lmcache.config.spec import variable
from lmcache.core.problems import Problems
from lmcache.errors import ConfigError
from lmcache.integration.in_process.translation import KEYS, Translation
from lmcache.telemetry.logs import LEVEL_VARIABLE

_ADAPTERS = "l2_adapter"
_PASSED = (LEVEL_VARIABLE, "LMCACHE_ADMIN_TOKEN", "LMCACHE_RESP_")  # by their beginnings: read by whoever needs them
_SOCKET = "its server has a socket of its own, and mp_host names another"
_HTTP = "internal_api_server_enabled, _host and _port_start say it"
_LISTENERS: Mapping[str, str] = {
    **dict.fromkeys(("host", "port"), _SOCKET),
    **dict.fromkeys(("http_host", "http_port", "prometheus_port", "disable_http"), _HTTP),
}

_NO_USE = "{} means nothing to an engine that starts its own server: {}."


def server_environment(environ: Mapping[str, str], options: Sequence[str], translation: Translation) -> dict[str, str]:
    """`environ`: the engine's; `options`: of `lmcache server`, which win. ConfigError names each variable, and each
    option of a file, that a server would read and that this one cannot obey."""
    problems = Problems()
    known = {variable(name): name for name in server_options()}
    kept: dict[str, str] = {}
    for key, value in environ.items():
        name = known.get(key, "")
        if not key.startswith("LMCACHE_") or key.startswith(_PASSED) or key == CONFIG_VARIABLE:
            kept[key] = value
        elif name in _LISTENERS and not is_of_kubernetes(value):
            problems.add(_NO_USE.format(key, _LISTENERS[name]))
        elif name and name not in KEYS and name not in _LISTENERS:
            kept[key] = value
    for name, where in file_sources(options, environ).items():
        if name in _LISTENERS:
            problems.add(_NO_USE.format(where, _LISTENERS[name]))
    problems.raise_all()
    if not translation.adapters:
        return kept
    given = draft(options, kept, Problems()).sources
    if _ADAPTERS in given:
        raise ConfigError(
            f"{given[_ADAPTERS]} and {' and '.join(translation.of_adapters)} both say where KV goes beside L1: give "
            "all of it by one of them."
        )
    return {**kept, **adapters_variable(translation.adapters)}


def adapters_variable(adapters: list[dict[str, Any]]) -> dict[str, str]:
    """Passes adapters in an environment variable: a command line, which anybody may read, is no place for passwords."""
    return {variable(_ADAPTERS): json.dumps(adapters)} if adapters else {}
