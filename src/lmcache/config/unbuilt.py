"""Every name of LMCache's documents that this version does not have, and what to use instead.

The command line, the options, the adapters and the HTTP listener refuse them from here: one that gets built is deleted
here, one that is documented anew is added here. Each text ends a sentence that names what was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping

_COORDINATOR = "`lmcache coordinator` is the controller of servers that name it by --coordinator-url"
_AT_COORDINATOR = "`lmcache coordinator` has it, for servers that name it by --coordinator-url"
_SHARED_FOLDER = 'several servers can share a folder of a network file system ("type": "fs")'
_NIXL = '"type": "nixl_store" keeps objects by NIXL, and --p2p-transfer-engine nixl reads those of other servers by it'
_PREFILL = (
    "kv_role of engines and a router separate prefill and decode, over one server or peers "
    "(docs/how-to/separate_prefill_and_decode.md)"
)
_PEERS = "--p2p-advertise-url and --p2p-peers let servers load from each other"
_PLUGIN = '"type": "plugin" takes an adapter of your own (docs/how-to/write-an-adapter.md)'
_RUNTIME_PLUGINS = "--runtime-plugin-locations is what a server has for it"
_BLEND = "only common prefixes are reused"
_CLEAR = "POST /cache/clear empties L1, L2 or both"

COMMANDS: Mapping[str, str] = {
    "controller": _COORDINATOR,
}

# Options of `lmcache coordinator`, and the default, which changes nothing.
_EVICTION = "each server keeps the quotas that it is told, by --eviction-policy IsolatedLRU"
COORDINATOR_OPTIONS: Mapping[str, tuple[str, str]] = {
    "--otlp-endpoint": ("", "GET /metrics has its figures"),
    "--eviction-check-interval": ("5", _EVICTION),
    "--eviction-ratio": ("0.2", _EVICTION),
    "--trigger-watermark": ("1.0", _EVICTION),
}

# Options of `lmcache server` by their names with underscores, as in files. Those that are declared in config/spec.py
# have a value that changes nothing, which is accepted.
OPTIONS: Mapping[str, str] = {}
OPTION_FAMILIES: Mapping[str, str] = {  # by their beginning
    "controller_": _COORDINATOR,
}
OPTION_VALUES: Mapping[str, Mapping[str, str]] = {
    "engine_type": {"blend": _BLEND},
}

# Keys of the file that configures LMCache inside an engine, without a server.
_L1_SIZE = "--l1-size-gb is how much memory this server takes"
_FOLDER = '--l2-adapter \'{"type": "fs_native", "base_path": ..., "max_capacity_gb": ...}\' keeps KV on a disk'
_CONNECTOR = "the keys lmcache.mp.* of vLLM's kv_connector_extra_config say what an engine does"
_REMOTE = "remote_url names the one store behind this machine, extra_config what else it needs"
_TIERS = "objects go to every tier and are looked for in all: --l2-store-policy and --l2-prefetch-policy decide"
_LOOKUPS = "the server answers lookups for all ranks, in L1 and behind it"
_LAZY = "--l1-init-size-gb is how much of L1 is taken at once, the rest as it fills"
_STATISTICS = "GET /metrics, GET /status and `lmcache top` have a server's figures, --lookup-hash-log-dir its lookups"
_HTTP_LISTENER = "--http-host and --http-port are where a server answers, for all ranks"
_HIDDEN_STATES = "KV alone is stored"
_ENCODER = "what encoders make of media is not stored, KV alone is"
_COSTS = "--eviction-policy is LRU or S3FIFO, which know no costs"
_LEASES = "leases end by themselves: --l1-read-ttl-seconds says when"
_HEARTBEAT = "lmcache.mp.heartbeat_interval is how often an engine is heard of"
IN_PROCESS_KEYS: Mapping[str, str] = {
    "config_file": "--config or LMCACHE_CONFIG names the file of a server",
    "local_cpu": _L1_SIZE,
    "max_local_cpu_size": _L1_SIZE,
    "reserve_local_cpu_size": _L1_SIZE,
    "enable_lazy_memory_allocator": "--l1-use-lazy is what a server has for it",
    "local_disk": _FOLDER,
    "max_local_disk_size": _FOLDER,
    "remote_url": _SHARED_FOLDER,
    "remote_serde": 'the key "serde" of an --l2-adapter says what encodes objects on their way',
    "remote_storage_plugins": _PLUGIN,
    "remote_storage_plugin": _PLUGIN,
    "external_backends": _PLUGIN,
    "storage_plugins": _PLUGIN,
    "gds_path": _FOLDER,
    "weka_path": _FOLDER,
    "cufile_buffer_size": _FOLDER,
    "cache_policy": "--eviction-policy is what a server has for it",
    "pre_caching_hash_algorithm": "--hash-algorithm is what a server has for it",
    "save_decode_cache": "lmcache.mp.save_decode_cache in kv_connector_extra_config of an engine is for that",
    "save_unfull_chunk": "--chunk-size says how large chunks are; a partial one is stored where another engine goes on",
    "min_retrieve_tokens": _CONNECTOR,
    "blocking_timeout_secs": _CONNECTOR,
    "use_layerwise": _CONNECTOR,
    "enable_async_loading": "loads always go on beside other requests",
    "enable_blending": _BLEND,
    "enable_p2p": _PEERS,
    "enable_pd": _PREFILL,
    "enable_nixl": _NIXL,
    "enable_controller": _COORDINATOR,
    "lmcache_instance_id": "--instance-id names a server among others",
    "lmcache_worker_port": _COORDINATOR,
    "lmcache_worker_ports": _COORDINATOR,
    "numa_mode": "--l1-numa is what a server has for it",
    "internal_api_server_enabled": "--http-port is where the server answers",
    "internal_api_server_host": "--http-host is where the server answers",
    "internal_api_server_port_start": "--http-port is where the server answers",
    "plugin_locations": _RUNTIME_PLUGINS,
    "extra_config": _CONNECTOR,
    "priority_limit": _CONNECTOR,
    "retrieve_locations": _TIERS,
    "store_location": _TIERS,
    "transfer_channel": _NIXL,
    "enable_xpyd": _PREFILL,
    "use_gds": _FOLDER,
    "audit_actual_remote_url": _REMOTE,
    "external_lookup_client": _LOOKUPS,
    "lookup_server_worker_ids": _LOOKUPS,
    "enable_scheduler_bypass_lookup": _LOOKUPS,
    "hit_miss_ratio": _LOOKUPS,
    "py_enable_gc": "Python's collector runs in engine and server alike",
    "script_allowed_imports": "nobody's code runs in the engine; --runtime-plugin-locations runs it beside a server",
    "enable_chunk_statistics": _STATISTICS,
    "enable_kv_events": "an engine with --kv-events-config publishes what its server has, too, and a server with "
    "--kv-events-endpoint what it stores",
    "use_gpu_connector_v3": "how KV leaves the GPU is not to be chosen",
    "remote_config_url": "LMCACHE_CONFIG_FILE names a file of this machine",
    "app_id": "LMCACHE_CONFIG_FILE names a file of this machine",
    "enable_hidden_state_cache": _HIDDEN_STATES,
    "max_hidden_state_cpu_size": _HIDDEN_STATES,
    "hidden_state_layers": _HIDDEN_STATES,
    "hidden_states_retrieve_mode": _HIDDEN_STATES,
}
# What LMCache does, unless it is told otherwise, and what changes nothing here.
IN_PROCESS_IDLE_VALUES: Mapping[str, str] = {
    "py_enable_gc": "true",
    "use_gds": "true",
    "gds_path_sharding": "by_gpu",
}
IN_PROCESS_FAMILIES: Mapping[str, str] = {
    "blend_": _BLEND,
    "pd_": IN_PROCESS_KEYS["enable_pd"],
    "p2p_": _PEERS,
    "nixl_": _NIXL,
    "gds_": _FOLDER,
    "maru_": _FOLDER,
    "cost_aware_": _COSTS,
    "lmcache_worker_": _HEARTBEAT,
    "internal_api_server_": _HTTP_LISTENER,
    "lazy_memory_": _LAZY,
    "chunk_statistics_": _STATISTICS,
    "pin_": _LEASES,
    "ec_": _ENCODER,
}

ADAPTERS: Mapping[str, str] = {
    "infinistore": '"type": "mooncake_store" shares the memory of machines over RDMA or TCP, "resp" a Redis or Valkey '
    f'and "s3" a bucket, and {_PLUGIN}',
    "p2p": _PEERS,
}
# What people call them: the documented type, and what else it needs.
ADAPTER_ALIASES: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("redis", "rediss", "valkey", "keydb", "dragonfly"), ("resp", "")),
    **dict.fromkeys(
        ("disk", "file", "files", "folder", "local", "local_disk", "ssd", "nvme", "posix"), ("fs_native", "")
    ),
    **dict.fromkeys(("nfs", "filesystem", "file_system", "lustre", "gpfs", "ceph"), ("fs", "")),
    **dict.fromkeys(("raw", "block", "block_device", "device", "spdk"), ("raw_block", "")),
    **dict.fromkeys(("cxl", "pmem", "devdax", "dev_dax"), ("dax", "")),
    "nixl": ("nixl_store", ""),
    "nixl_dynamic": ("nixl_store_dynamic", ""),
    **dict.fromkeys(("gds", "cufile"), ("nixl_store", '"backend": "GDS"')),
    "gds_mt": ("nixl_store", '"backend": "GDS_MT"'),
    **dict.fromkeys(("hf3fs", "3fs"), ("nixl_store", '"backend": "HF3FS"')),
    **dict.fromkeys(("azure", "azure_blob"), ("nixl_store", '"backend": "AZURE_BLOB"')),
    "mooncake": ("mooncake_store", ""),
    **dict.fromkeys(("aws", "aws_s3", "minio", "ceph_rgw", "object_store"), ("s3", "")),
    **dict.fromkeys(("python", "custom", "external"), ("plugin", "")),
    "native": ("native_plugin", ""),
    "peer": ("p2p", ""),
    "infini_store": ("infinistore", ""),
}
_LOSSLESS = '"zstd" and "exponent" compress without loss'
SERDES: Mapping[str, str] = {
    "turboquant": _LOSSLESS,
}

# Paths of documented HTTP interfaces that a server does not have, `{name}` for a part that varies.
_SERDE = 'the key "serde" of an --l2-adapter encodes what that adapter stores, and'
HTTP: Mapping[str, str] = {
    "/cache/delete": "DELETE /cache/objects deletes",
    "/pin": "POST /cache/pins pins objects",
    "/unpin": "DELETE /cache/pins unpins objects",
    "/compress": f"{_SERDE} POST /compress of a coordinator moves a prompt from L1 to it",
    "/decompress": f"{_SERDE} POST /decompress of a coordinator moves a prompt from it to L1",
    "/lookup": "POST /cache/lookup looks tokens up",
    "/clear": _CLEAR,
    "/move": "POST /cache/moves moves objects between its tiers, and a coordinator moves them between servers",
    "/health": "GET /healthcheck and GET /readyz tell its health",
    "/check_finish": "GET /jobs/ID tells how far a job is",
    "/query_instance": _AT_COORDINATOR,
    "/query_worker_info": _AT_COORDINATOR,
    "/controller/{rest:path}": _AT_COORDINATOR,
    "/instances": _AT_COORDINATOR,
    "/instances/{rest:path}": _AT_COORDINATOR,
    "/events": _AT_COORDINATOR,
    "/directory/{rest:path}": _AT_COORDINATOR,
}


def option(name: str) -> str:
    """What to use instead of an option by its name with underscores; "" for a name that no document has."""
    if name in OPTIONS:
        return OPTIONS[name]
    return _of_family(name, OPTION_FAMILIES)


def in_process_key(name: str) -> str:
    """The same for a key of the file that configures LMCache inside an engine."""
    if name in IN_PROCESS_KEYS:
        return IN_PROCESS_KEYS[name]
    return _of_family(name, {**IN_PROCESS_FAMILIES, **OPTION_FAMILIES})


def _of_family(name: str, families: Mapping[str, str]) -> str:
    return next((instead for beginning, instead in families.items() if name.startswith(beginning)), "")
