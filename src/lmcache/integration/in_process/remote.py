"""The adapter that a `remote_url` stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

from lmcache.errors import ConfigError

Adapter = dict[str, Any]


def remote_adapter(where: str, url: str, extra: Mapping[str, Any]) -> Adapter:
    """Its JSON. `extra`: what extra_config gives it beside the URL. ConfigError begins with `where`."""
    parts = urlsplit(url)
    make = _MAKERS.get(parts.scheme)
    if make is None:
        instead = _INSTEAD.get(parts.scheme, f"it must begin with one of {', '.join(_MAKERS)} and ://")
        raise ConfigError(f"{where} has {f'the scheme {parts.scheme}' if parts.scheme else 'no scheme'}: {instead}.")
    return make(where, parts, extra)


def _resp(where: str, url: SplitResult, extra: Mapping[str, Any]) -> Adapter:
    scheme = {"valkey": "redis", "valkeys": "rediss"}.get(url.scheme, url.scheme)
    return {"type": "resp", "url": url._replace(scheme=scheme).geturl(), **extra}


def _s3(where: str, url: SplitResult, extra: Mapping[str, Any]) -> Adapter:
    if "s3_region" not in extra:
        raise ConfigError(f'{where} names a bucket and no region: give extra_config the key "s3_region".')
    return {"type": "s3", "s3_endpoint": url.geturl().rstrip("/"), **extra}


def _mooncake(where: str, url: SplitResult, extra: Mapping[str, Any]) -> Adapter:
    missing = [key for key in ("local_hostname", "metadata_server") if key not in extra]
    if missing:
        raise ConfigError(f'{where} needs the key "{missing[0]}" of extra_config.')
    renamed = {"device_name": "rdma_devices"}
    adapter = {renamed.get(key, key): value for key, value in extra.items()}
    return {"type": "mooncake_store", "master_server_addr": url.netloc, **adapter}


def _folder(where: str, url: SplitResult, extra: Mapping[str, Any]) -> Adapter:
    """The host of fs:// says nothing: a folder is where the machine has it mounted."""
    if not url.path.strip("/"):
        raise ConfigError(f"{where} names no folder; write {url.scheme}:///data/lmcache.")
    if "," in url.path:
        raise ConfigError(f"{where} names several folders and KV goes to one: name one.")
    return {"type": "fs", "base_path": url.path, **extra}


_MAKERS: Mapping[str, Callable[[str, SplitResult, Mapping[str, Any]], Adapter]] = {
    **dict.fromkeys(("redis", "rediss", "unix", "valkey", "valkeys"), _resp),
    "s3": _s3,
    **dict.fromkeys(("mooncakestore", "mooncake"), _mooncake),
    **dict.fromkeys(("fs", "file"), _folder),
}
_INSTEAD: Mapping[str, str] = {
    "lm": "a server of this version is reached by mp_host and mp_port",
    "redis-sentinel": 'start a server with --l2-adapter \'{"type": "resp", "sentinel": ...}\' and name it by mp_host',
    "infinistore": "redis://, s3:// or mooncakestore:// share objects between machines",
}
