"""What the keys of LMCache inside an engine mean for a server, and the sentences for those that mean nothing here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmcache.config.load import load
from lmcache.config.unbuilt import IN_PROCESS_IDLE_VALUES, IN_PROCESS_KEYS, in_process_key
from lmcache.errors import ConfigError
from lmcache.integration.engine.server_order import private_order
from lmcache.integration.in_process.server_variables import adapters_variable
from lmcache.integration.in_process.translation import KEYS, translate
from lmcache.l2.adapter_types import parse_adapter

# What LMCache's own documents and its `lmcache/v1/config.py` name, aliases and deprecated names included.
LMCACHE_KEYS = """
    app_id audit_actual_remote_url blend_check_layers blend_min_tokens blend_recompute_ratios blend_special_str
    blend_thresholds blocking_timeout_secs cache_policy chunk_size chunk_statistics_auto_exit_target_unique_chunks
    chunk_statistics_auto_exit_timeout_hours chunk_statistics_auto_start_statistics chunk_statistics_strategy
    controller_pull_url controller_reply_url controller_url cost_aware_ewma_alpha cost_aware_half_life_seconds
    cufile_buffer_size enable_async_loading enable_blending enable_chunk_statistics enable_controller
    enable_hidden_state_cache enable_kv_events enable_lazy_memory_allocator enable_nixl enable_p2p enable_pd
    enable_scheduler_bypass_lookup enable_xpyd external_backends external_lookup_client extra_config gds_backend
    gds_buffer_size gds_path gds_path_sharding hidden_state_layers hidden_states_retrieve_mode hit_miss_ratio
    internal_api_server_enabled internal_api_server_host internal_api_server_include_index_list
    internal_api_server_port_start internal_api_server_socket_path_prefix lazy_memory_expand_trigger_ratio
    lazy_memory_initial_ratio lazy_memory_safe_size lazy_memory_step_ratio lmcache_instance_id
    lmcache_worker_heartbeat_delay_time lmcache_worker_heartbeat_time lmcache_worker_ids lmcache_worker_port
    lmcache_worker_ports local_cpu local_cpu_use_hugepages local_disk local_disk_path_sharding lookup_server_worker_ids
    lookup_timeout_ms maru_path maru_pool_size max_hidden_state_cpu_size max_local_cpu_size max_local_disk_size
    min_retrieve_tokens mp_host mp_port nixl_backends nixl_buffer_device nixl_buffer_size nixl_peer_host nixl_peer_port
    nixl_proxy_host nixl_role numa_mode p2p_host p2p_init_ports p2p_lookup_ports pd_allocation_timeout_sec
    pd_backend_mode pd_bidirectional pd_buffer_device pd_buffer_size pd_condition_poll_interval_sec pd_max_prefill_len
    pd_peer_alloc_port pd_peer_host pd_peer_init_port pd_peer_query_port pd_proxy_host pd_proxy_port pd_role
    pd_shutdown_timeout_sec pd_skip_proxy_notification pin_check_interval_sec pin_timeout_sec plugin_locations
    pre_caching_hash_algorithm priority_limit py_enable_gc remote_config_url remote_serde remote_storage_plugins
    remote_url reserve_local_cpu_size retrieve_locations runtime_plugin_locations save_decode_cache save_unfull_chunk
    script_allowed_imports storage_plugins store_location transfer_channel use_gds use_gpu_connector_v3 use_layerwise
    ec_connector weka_path
"""


def config_of(extra: dict[str, Any], environ: dict[str, str] | None = None) -> Any:
    """Of the server that results, checked as a server checks it."""
    translation = translate(extra, environ or {})
    order = private_order("x", translation.options, adapters_variable(translation.adapters))
    config = load(order.options, order.environment).config
    for index, adapter in enumerate(config.l2_adapter):
        parse_adapter(adapter, index)
    return config


def refusals(extra: dict[str, Any], environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        translate(extra, environ or {})
    return list(refused.value.problems)


def test_nothing_said_is_five_gigabytes_and_no_listener() -> None:
    config = config_of({})
    assert (config.l1_size_gb, config.eviction_policy, config.chunk_size) == (5.0, "LRU", 256)
    assert config.disable_http
    assert config.l2_adapter == []


def test_the_file_gives_way_to_the_environment_and_that_to_the_engine(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 128\nmax_local_cpu_size: 1.5\nlocal_cpu: true\ncache_policy: S3FIFO\n")
    environ = {"LMCACHE_CONFIG_FILE": str(file), "LMCACHE_CHUNK_SIZE": "512", "LMCACHE_MAX_LOCAL_CPU_SIZE": "2"}
    config = config_of({"lmcache.max_local_cpu_size": 3}, environ)
    assert (config.chunk_size, config.l1_size_gb, config.eviction_policy) == (512, 3.0, "S3FIFO")


@pytest.mark.parametrize(
    ("keys", "adapter"),
    [
        ({"local_disk": "file:///data/kv"}, {"type": "fs_native", "base_path": "/data/kv"}),
        (
            {"local_disk": "/data/kv", "max_local_disk_size": 7},
            {
                "type": "fs_native",
                "base_path": "/data/kv",
                "max_capacity_gb": 7.0,
                "eviction": {"eviction_policy": "LRU"},
            },
        ),
        ({"remote_url": "redis://u:p@h:6379"}, {"type": "resp", "url": "redis://u:p@h:6379"}),
        ({"remote_url": "valkey://h:6379"}, {"type": "resp", "url": "redis://h:6379"}),
        (
            {"remote_url": "redis://h:1", "remote_serde": "zstd", "blocking_timeout_secs": 3},
            {"type": "resp", "url": "redis://h:1", "timeout_seconds": 3.0, "serde": {"type": "zstd"}},
        ),
        (
            {"remote_url": "s3://bucket/x", "extra_config": {"s3_region": "eu"}},
            {"type": "s3", "s3_endpoint": "s3://bucket/x", "s3_region": "eu"},
        ),
        ({"remote_url": "fs://host:0/data/kv"}, {"type": "fs", "base_path": "/data/kv"}),
        (
            {
                "remote_url": "mooncakestore://h:50051/",
                "extra_config": {"local_hostname": "h", "metadata_server": "P2PHANDSHAKE", "device_name": ""},
            },
            {
                "type": "mooncake_store",
                "master_server_addr": "h:50051",
                "local_hostname": "h",
                "metadata_server": "P2PHANDSHAKE",
                "rdma_devices": "",
            },
        ),
    ],
)
def test_a_place_for_kv_is_an_adapter(keys: dict[str, Any], adapter: dict[str, Any]) -> None:
    assert config_of({f"lmcache.{key}": value for key, value in keys.items()}).l2_adapter == [adapter]


def test_the_disk_is_asked_before_the_remote_store() -> None:
    config = config_of({"lmcache.local_disk": "/d", "lmcache.remote_url": "redis://h:1", "lmcache.local_cpu": False})
    assert [adapter["type"] for adapter in config.l2_adapter] == ["fs_native", "resp"]
    assert config.l2_store_policy == "skip_l1"


def test_every_other_key_arrives(tmp_path: Path) -> None:
    environ = {
        "LMCACHE_PRE_CACHING_HASH_ALGORITHM": "sha256_cbor",
        "LMCACHE_LOCAL_CPU_USE_HUGEPAGES": "True",
        "LMCACHE_NUMA_MODE": "interleave",
        "LMCACHE_RUNTIME_PLUGIN_LOCATIONS": f'["{tmp_path}"]',
        "LMCACHE_LMCACHE_INSTANCE_ID": "one",
        "LMCACHE_ENABLE_LAZY_MEMORY_ALLOCATOR": "false",
        "LMCACHE_INTERNAL_API_SERVER_ENABLED": "true",
        "LMCACHE_ENABLE_ASYNC_LOADING": "true",
    }
    config = config_of({}, environ)
    assert (config.hash_algorithm, config.l1_use_hugepages, config.l1_numa) == ("sha256_cbor", True, "interleave")
    assert (config.runtime_plugin_locations, config.service_instance_id) == ([str(tmp_path)], "one")
    assert (config.l1_use_lazy, config.disable_http) == (False, False)
    assert (config.http_host, config.http_port) == ("127.0.0.1", 6999)


def test_what_is_the_connectors_goes_to_the_connector() -> None:
    extra = {
        "lmcache.save_decode_cache": True,
        "lmcache.lookup_timeout_ms": 1500,
        "lmcache.remote_url": "redis://h:1",
        "lmcache.remote_serde": "cachegen",
        "lmcache.mp_host": "cache",
        "lmcache.mp_port": 7,
    }
    assert translate(extra, {}).connector == {
        "lmcache.mp.save_decode_cache": True,
        "lmcache.mp.lookup_timeout": 1.5,
        "lmcache.mp.lossy_serde": "cachegen",
        "lmcache.mp.host": "cache",
        "lmcache.mp.port": 7,
    }


@pytest.mark.parametrize("key", sorted(set(LMCACHE_KEYS.split()) - set(KEYS)))
def test_every_key_of_lmcache_is_refused_by_name_wherever_it_stands(key: str, tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(f"{key}: x\n")
    variable = f"LMCACHE_{key.upper()}"
    rule = f"is no setting of this version: {in_process_key(key)}."
    assert in_process_key(key)
    assert refusals({f"lmcache.{key}": "x"}) == [f"lmcache.{key} {rule}"]
    assert refusals({}, {variable: "x"}) == [f"{variable} {rule}"]
    assert refusals({}, {"LMCACHE_CONFIG_FILE": str(file)}) == [f"{key} in {file} {rule}"]


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("enable_kv_events", "an engine with --kv-events-config publishes"),
        *(
            ("enable_pd", "kv_role of engines and a router separate prefill"),
            ("pd_role", "kv_role of engines and a router separate prefill"),
            ("enable_xpyd", "kv_role of engines and a router separate prefill"),
        ),
        *(("transfer_channel", "--p2p-transfer-engine nixl"), ("nixl_role", '"type": "nixl_store"')),
    ],
)
def test_what_there_is_instead_is_named(key: str, named: str) -> None:
    (refusal,) = refusals({f"lmcache.{key}": "x"})
    assert named in refusal


def test_what_changes_nothing_here_is_no_reason_to_refuse() -> None:
    for key, value in IN_PROCESS_IDLE_VALUES.items():
        translate({f"lmcache.{key}": value}, {f"LMCACHE_{key.upper()}": value.title()})
    translate({"lmcache.py_enable_gc": True}, {"LMCACHE_LOCAL_DISK_PATH_SHARDING": "by_gpu"})


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"remote_serde": "cachegen"}, "lmcache.remote_serde has no effect: there is no remote_url"),
        (
            {"blocking_timeout_secs": 3, "local_disk": "/d"},
            "lmcache.blocking_timeout_secs has no effect: there is no remote_url",
        ),
        (
            {"internal_api_server_port_start": 7777},
            "lmcache.internal_api_server_port_start has no effect: internal_api_server_enabled is not true",
        ),
        (
            {"internal_api_server_host": "0.0.0.0", "internal_api_server_enabled": False},
            "lmcache.internal_api_server_host has no effect: internal_api_server_enabled is not true",
        ),
        (
            {"enable_async_loading": False},
            "lmcache.enable_async_loading is false and has no effect: loads go on beside other requests",
        ),
    ],
)
def test_a_key_that_changes_nothing_beside_the_others_is_said(keys: dict[str, Any], sentence: str) -> None:
    assert translate({f"lmcache.{key}": value for key, value in keys.items()}, {}).idle == [sentence]


@pytest.mark.parametrize("key", sorted(set(IN_PROCESS_KEYS) - set(KEYS)))
def test_what_is_not_built_is_refused_by_name_unless_it_asks_for_nothing(key: str) -> None:
    assert refusals({f"lmcache.{key}": "x"}) == [
        f"lmcache.{key} is no setting of this version: {IN_PROCESS_KEYS[key]}."
    ]
    nothings: list[Any] = [None, False, "", 0, [], "False", "none"]
    for nothing in nothings:
        assert translate({f"lmcache.{key}": nothing}, {}).adapters == []


@pytest.mark.parametrize(
    ("extra", "environ", "sentence"),
    [
        ({"lmcache.chunk_sise": 1}, {}, "lmcache.chunk_sise is not a key of LMCache; did you mean chunk_size?"),
        ({"lmcache.zebra": 1}, {}, "lmcache.zebra is not a key of LMCache; remove it."),
        (
            {},
            {"LMCACHE_MAX_LOCAL_CPU_SISE": "1"},
            "LMCACHE_MAX_LOCAL_CPU_SISE in the environment is not a key of LMCache; did you mean "
            "LMCACHE_MAX_LOCAL_CPU_SIZE?",
        ),
        ({"lmcache.chunk_size": "many"}, {}, "lmcache.chunk_size must be a whole number of tokens, got 'many'."),
        (
            {"lmcache.cache_policy": "LFU"},
            {},
            "lmcache.cache_policy cannot be LFU, which is not built yet (use LRU or S3FIFO); it must be one of LRU, "
            "S3FIFO, noop.",
        ),
        (
            {"lmcache.remote_url": "lm://h:1"},
            {},
            "lmcache.remote_url has the scheme lm: a server of this version is reached by mp_host and mp_port.",
        ),
        (
            {"lmcache.remote_url": "s3://b"},
            {},
            'lmcache.remote_url names a bucket and no region: give extra_config the key "s3_region".',
        ),
        (
            {"lmcache.local_cpu": False},
            {},
            "lmcache.local_cpu is false: then local_disk or remote_url has to keep KV.",
        ),
        (
            {"lmcache.max_local_disk_size": 5},
            {},
            "lmcache.max_local_disk_size needs local_disk, the folder to keep KV in.",
        ),
        (
            {"lmcache.nixl_buffer_size": 5},
            {},
            f"lmcache.nixl_buffer_size is no setting of this version: {IN_PROCESS_KEYS['enable_nixl']}.",
        ),
        (
            {},
            {"LMCACHE_LOCAL_DISK": "file:///mnt/nvme0/lm,file:///mnt/nvme1/lm"},
            "LMCACHE_LOCAL_DISK names 2 folders and KV goes to one: name one, on a file system that spans their disks "
            "(RAID 0, LVM).",
        ),
        (
            {"lmcache.local_disk": "/a, /b,/c"},
            {},
            "lmcache.local_disk names 3 folders and KV goes to one: name one, on a file system that spans their disks "
            "(RAID 0, LVM).",
        ),
        (
            {"lmcache.remote_url": "fs://h:0/a,/b"},
            {},
            "lmcache.remote_url names several folders and KV goes to one: name one.",
        ),
        ({}, {"LMCACHE_CONFIG_FILE": "/nowhere.yaml"}, "LMCACHE_CONFIG_FILE /nowhere.yaml cannot be read: "),
    ],
)
def test_what_is_wrong_is_one_sentence(extra: dict[str, Any], environ: dict[str, str], sentence: str) -> None:
    (said,) = refusals(extra, environ)
    assert said.startswith(sentence) if sentence.endswith(": ") else said == sentence


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("enable_p2p: true\nchunk_size: 0\nmystery: 1\n")
    said = refusals({"lmcache.enable_blending": True}, {"LMCACHE_CONFIG_FILE": str(file)})
    assert len(said) == 4
    assert all(str(file) in sentence for sentence in said if "enable_blending" not in sentence)


def test_variables_of_others_are_left_alone() -> None:
    environ = {"LMCACHE_LOG_LEVEL": "DEBUG", "LMCACHE_USE_UPSTREAM_MP": "1", "LMCACHE_SERVICE_HOST": "10.0.0.1"}
    assert translate({"other": 1, "lmcache.mp.port": 7}, environ).connector == {}


def test_use_native_is_vllms_own_and_is_no_key_of_lmcache() -> None:
    """vLLM reads it before anything here is loaded: tests/unit/integration/vllm/test_connector.py has what follows."""
    assert translate({"use_native": True}, {}) == translate({}, {})
    assert refusals({"lmcache.use_native": True}) == ["lmcache.use_native is not a key of LMCache; remove it."]
