"""What the keys of LMCache inside an engine mean for a server and for the connector.

A key that this version does not have is refused by name, with what to use instead, unless its value asks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmcache.config import unbuilt
from lmcache.config.values import Choice, JsonObject, Kind, Listed, Number, Switch, Text, Whole
from lmcache.core.problems import Problems
from lmcache.errors import ConfigError
from lmcache.integration.in_process.remote import remote_adapter
from lmcache.integration.in_process.sources import Given, read_sources

_ADMIN_PORT = 6999
_GB = Number(unit="GB", minimum=0, maximum=1 << 20)
_LOSSY = ("fp8", "cachegen")
_POLICIES = {"LFU": "LRU or S3FIFO", "FIFO": "S3FIFO", "MRU": "LRU"}

KEYS: Mapping[str, Kind] = {
    "chunk_size": Whole(unit="tokens", minimum=1),
    "local_cpu": Switch(),
    "max_local_cpu_size": Number(unit="GB", above=0, maximum=1 << 20),
    "local_disk": Text("FOLDER"),
    "local_disk_path_sharding": Choice(("by_gpu",)),  # of several folders, which are refused
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
    `of_server`: how the keys that a running server would not hear of are named; `of_adapters`: those of its L2.
    `idle`: which key changes nothing beside the others, a sentence each without its full stop."""

    options: list[str] = field(default_factory=list)
    adapters: list[dict[str, Any]] = field(default_factory=list)
    connector: dict[str, Any] = field(default_factory=dict)
    of_server: list[str] = field(default_factory=list)
    of_adapters: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)


def translate(extra: Mapping[str, Any], environ: Mapping[str, str]) -> Translation:
    """`extra`: kv_connector_extra_config. ConfigError lists every problem, a sentence each."""
    problems = Problems()
    known = frozenset({*KEYS, *unbuilt.IN_PROCESS_KEYS})
    given = read_sources(extra, environ, known, problems, is_named=lambda name: bool(unbuilt.in_process_key(name)))
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
    translation.idle += _idle(values, given)
    problems.raise_all()
    return translation


def _take(name: str, item: Given, values: dict[str, Any]) -> None:
    if item.value is None or (isinstance(item.value, str) and item.value.lower() in ("", "none", "null")):
        return
    if item.value is False and isinstance(KEYS.get(name), Text):
        return
    if name not in KEYS:
        if str(item.value).lower() not in (*_NOTHING, unbuilt.IN_PROCESS_IDLE_VALUES.get(name)):
            raise ConfigError(f"{item.where} is no setting of this version: {unbuilt.in_process_key(name)}.")
        return
    try:
        values[name] = KEYS[name].parse(item.value)
    except ValueError as error:
        sentence = f"{item.where} {error}"
        raise ConfigError(sentence if sentence.endswith(("?", ".")) else sentence + ".") from None


def _memory(values: Mapping[str, Any], given: Mapping[str, Given], translation: Translation) -> None:
    options = translation.options
    if "max_local_cpu_size" in values:
        options += ["--l1-size-gb", f"{values['max_local_cpu_size']:g}"]
    for name, flag in (
        ("cache_policy", "--eviction-policy"),
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
    folder, size_gb = _folder(values, given), values.get("max_local_disk_size", 0.0)
    if folder:
        translation.of_adapters.append(given["local_disk"].where)
        adapter: dict[str, Any] = {"type": "fs_native", "base_path": folder}
        if size_gb:
            adapter |= {"max_capacity_gb": size_gb, "eviction": {"eviction_policy": values.get("cache_policy", "LRU")}}
        translation.adapters.append(adapter)
    elif size_gb:
        raise ConfigError(f"{given['max_local_disk_size'].where} needs local_disk, the folder to keep KV in.")
    url, extra = values.get("remote_url", ""), values.get("extra_config", {})
    if url:
        translation.of_adapters.append(given["remote_url"].where)
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


def _folder(values: Mapping[str, Any], given: Mapping[str, Given]) -> str:
    folders = [folder.strip() for folder in values.get("local_disk", "").split(",")]
    if len(folders) > 1:
        raise ConfigError(
            f"{given['local_disk'].where} names {len(folders)} folders and KV goes to one: name one, on a file system "
            "that spans their disks (RAID 0, LVM)."
        )
    return str(folders[0]).removeprefix("file://")


def _listeners(values: Mapping[str, Any], translation: Translation) -> None:
    if not values.get("internal_api_server_enabled"):
        translation.options.append("--disable-http")
        return
    host = values.get("internal_api_server_host", "127.0.0.1")
    port = values.get("internal_api_server_port_start", _ADMIN_PORT)
    translation.options += ["--http-host", host, "--http-port", str(port), "--prometheus-port", "0"]


def _idle(values: Mapping[str, Any], given: Mapping[str, Given]) -> Iterator[str]:
    if not values.get("remote_url"):
        for name in ("remote_serde", "blocking_timeout_secs"):
            if values.get(name, "naive") != "naive":
                yield f"{given[name].where} has no effect: there is no remote_url"
    if not values.get("internal_api_server_enabled"):
        for name in ("internal_api_server_host", "internal_api_server_port_start"):
            if name in values:
                yield f"{given[name].where} has no effect: internal_api_server_enabled is not true"
    if not values.get("enable_async_loading", True):
        yield f"{given['enable_async_loading'].where} is false and has no effect: loads go on beside other requests"


def _connector(values: Mapping[str, Any], translation: Translation) -> None:
    connector = translation.connector
    for name, key in (("mp_host", "lmcache.mp.host"), ("mp_port", "lmcache.mp.port")):
        if name in values:
            connector[key] = values[name]
    if "save_decode_cache" in values:
        connector["lmcache.mp.save_decode_cache"] = values["save_decode_cache"]
    if "lookup_timeout_ms" in values:
        connector["lmcache.mp.lookup_timeout"] = values["lookup_timeout_ms"] / 1e3
