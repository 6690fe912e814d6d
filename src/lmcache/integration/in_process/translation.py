"""What the keys of LMCache inside an engine mean for a server and for the connector.

A key that is not built is refused by name, with what to use instead, unless its value asks for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lmcache.config import unbuilt
from lmcache.config.values import Choice, JsonObject, Kind, Listed, Number, Switch, Text, Whole
from lmcache.core.problems import Problems
from lmcache.errors import ConfigError
from lmcache.integration.in_process.remote import remote_adapter
from lmcache.integration.in_process.sources import Given, read_sources

DEFAULT_L1_SIZE_GB = 5.0
_ADMIN_PORT = 6999
_GB = Number(unit="GB", minimum=0, maximum=1 << 20)
_LOSSY = ("fp8", "cachegen")
_POLICIES = {"LFU": "LRU or S3FIFO", "FIFO": "S3FIFO", "MRU": "LRU"}

KEYS: Mapping[str, Kind] = {
    "chunk_size": Whole(unit="tokens", minimum=1),
    "local_cpu": Switch(),
    "max_local_cpu_size": Number(unit="GB", above=0, maximum=1 << 20),
    "local_disk": Text("FOLDER"),
    "max_local_disk_size": _GB,
    "remote_url": Text("URL"),
    "remote_serde": Choice(("naive", "zstd", "exponent", *_LOSSY)),
    "cache_policy": Choice(
        ("LRU", "S3FIFO", "noop"), unbuilt={name: f"use {instead}" for name, instead in _POLICIES.items()}
    ),
    "pre_caching_hash_algorithm": Choice(("builtin", "sha256_cbor", "blake3")),
    "save_decode_cache": Switch(),
    "numa_mode": Text("PLACEMENT"),
    "local_cpu_use_hugepages": Switch(),
    "enable_lazy_memory_allocator": Switch(),
    "lookup_timeout_ms": Number(unit="milliseconds", above=0),
    "blocking_timeout_secs": Number(unit="seconds", above=0),
    "runtime_plugin_locations": Listed(Text("PATH")),
    "lmcache_instance_id": Text("ID"),
    "mp_host": Text("HOST"),
    "mp_port": Whole(minimum=1, maximum=65535),
    "extra_config": JsonObject(),
    "internal_api_server_enabled": Switch(),
    "internal_api_server_host": Text("HOST"),
    "internal_api_server_port_start": Whole(minimum=0, maximum=65535),
    "enable_async_loading": Switch(),  # it is always so
}
_NOTHING = ("", "none", "null", "false", "0", "0.0", "[]", "{}")
_OF_CONNECTOR = {"mp_host", "mp_port", "save_decode_cache", "lookup_timeout_ms", "enable_async_loading"}


@dataclass
class Translation:
    """`options` of a server, but where it listens; `adapters`, its L2; `connector`, keys lmcache.mp.* for the engine;
    `of_server`: how the keys that a running server would not hear of are named."""

    options: list[str] = field(default_factory=list)
    adapters: list[dict[str, Any]] = field(default_factory=list)
    connector: dict[str, Any] = field(default_factory=dict)
    of_server: list[str] = field(default_factory=list)


def translate(extra: Mapping[str, Any], environ: Mapping[str, str]) -> Translation:
    """`extra`: kv_connector_extra_config. ConfigError lists every problem, a sentence each."""
    problems = Problems()
    known = frozenset({*KEYS, *unbuilt.IN_PROCESS_KEYS, *_in_families(extra, environ)})
    given = read_sources(extra, environ, known, problems)
    values: dict[str, Any] = {}
    for name, item in given.items():
        with problems.collect():
            _take(name, item, values)
    problems.raise_all()
    translation = Translation(of_server=[given[name].where for name in given if name not in _OF_CONNECTOR])
    with problems.collect():
        _memory(values, given, translation)
    with problems.collect():
        _tiers(values, given, translation)
    _listeners(values, translation)
    _connector(values, translation)
    problems.raise_all()
    return translation


def _in_families(extra: Mapping[str, Any], environ: Mapping[str, str]) -> set[str]:
    """Names that are refused by their beginning alone, as far as they are given."""
    names = {key.removeprefix("lmcache.") for key in extra if key.startswith("lmcache.")}
    names |= {key.removeprefix("LMCACHE_").lower() for key in environ if key.startswith("LMCACHE_")}
    return {name for name in names if unbuilt.in_process_key(name)}


def _take(name: str, item: Given, values: dict[str, Any]) -> None:
    if item.value is None or (isinstance(item.value, str) and item.value.lower() in ("", "none", "null")):
        return
    if item.value is False and isinstance(KEYS.get(name), Text):
        return
    if name not in KEYS:
        if str(item.value).lower() not in _NOTHING:
            raise ConfigError(f"{item.where} is not built: {unbuilt.in_process_key(name)}.")
        return
    try:
        values[name] = KEYS[name].parse(item.value)
    except ValueError as error:
        sentence = f"{item.where} {error}"
        raise ConfigError(sentence if sentence.endswith(("?", ".")) else sentence + ".") from None


def _memory(values: Mapping[str, Any], given: Mapping[str, Given], translation: Translation) -> None:
    options = translation.options
    options += ["--l1-size-gb", f"{values.get('max_local_cpu_size', DEFAULT_L1_SIZE_GB):g}"]
    options += ["--eviction-policy", values.get("cache_policy", "LRU")]
    for name, flag in (
        ("chunk_size", "--chunk-size"),
        ("pre_caching_hash_algorithm", "--hash-algorithm"),
        ("lmcache_instance_id", "--service-instance-id"),
    ):
        if name in values:
            options += [flag, str(values[name])]
    for path in values.get("runtime_plugin_locations", []):
        options += ["--runtime-plugin-locations", path]
    if values.get("local_cpu_use_hugepages"):
        options.append("--l1-use-hugepages")
    if values.get("enable_lazy_memory_allocator") is False:
        options.append("--no-l1-use-lazy")
    placement = values.get("numa_mode", "")
    if placement == "manual":
        raise ConfigError(f"{given['numa_mode'].where} is manual: name the nodes of L1, such as bind:0.")
    if placement not in ("", "auto"):  # auto: where the kernel takes it, beside who copies first
        options += ["--l1-numa", placement]


def _tiers(values: Mapping[str, Any], given: Mapping[str, Given], translation: Translation) -> None:
    """Disk before remote, as each is asked in the order of the adapters."""
    folder, size_gb = _path(values.get("local_disk", "")), values.get("max_local_disk_size", 0.0)
    if folder:
        adapter: dict[str, Any] = {"type": "fs_native", "base_path": folder}
        if size_gb:
            adapter |= {"max_capacity_gb": size_gb, "eviction": {"eviction_policy": values.get("cache_policy", "LRU")}}
        translation.adapters.append(adapter)
    elif size_gb:
        raise ConfigError(f"{given['max_local_disk_size'].where} needs local_disk, the folder to keep KV in.")
    url, extra = values.get("remote_url", ""), values.get("extra_config", {})
    if url:
        adapter = remote_adapter(given["remote_url"].where, url, extra)
        if "blocking_timeout_secs" in values:
            adapter["timeout_seconds"] = values["blocking_timeout_secs"]
        serde = values.get("remote_serde", "naive")
        if serde != "naive":
            adapter["serde"] = {"type": serde}
        if serde in _LOSSY:
            translation.connector["lmcache.mp.lossy_serde"] = serde
        translation.adapters.append(adapter)
    elif extra:
        raise ConfigError(f"{given['extra_config'].where} needs remote_url: its keys are those of the remote store.")
    if not values.get("local_cpu", True):
        if not translation.adapters:
            raise ConfigError(f"{given['local_cpu'].where} is false: then local_disk or remote_url has to keep KV.")
        translation.options += ["--l2-store-policy", "skip_l1"]


def _path(folder: str) -> str:
    return folder.removeprefix("file://")


def _listeners(values: Mapping[str, Any], translation: Translation) -> None:
    if not values.get("internal_api_server_enabled"):
        translation.options.append("--disable-http")
        return
    host = values.get("internal_api_server_host", "127.0.0.1")
    port = values.get("internal_api_server_port_start", _ADMIN_PORT)
    translation.options += ["--http-host", host, "--http-port", str(port), "--prometheus-port", "0"]


def _connector(values: Mapping[str, Any], translation: Translation) -> None:
    connector = translation.connector
    for name, key in (("mp_host", "lmcache.mp.host"), ("mp_port", "lmcache.mp.port")):
        if name in values:
            connector[key] = values[name]
    if "save_decode_cache" in values:
        connector["lmcache.mp.save_decode_cache"] = values["save_decode_cache"]
    if "lookup_timeout_ms" in values:
        connector["lmcache.mp.lookup_timeout"] = values["lookup_timeout_ms"] / 1e3


def adapters_variable(adapters: list[dict[str, Any]]) -> dict[str, str]:
    """As an environment variable: a command line, which anybody may read, is no place for passwords."""
    return {"LMCACHE_L2_ADAPTER": json.dumps(adapters)} if adapters else {}
