"""Adapter specifications: accepted whole, or refused in one sentence that says what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmcache.config import unbuilt
from lmcache.core.limits import GIB
from lmcache.errors import ConfigError
from lmcache.l2.adapter_config import EvictionConfig
from lmcache.l2.adapter_types import TYPES, build, check, parse_adapter
from lmcache.l2.adapters.folder_config import FsNativeConfig

FS = {"type": "fs_native", "base_path": "/nowhere/at/all"}
MOCK = {"type": "mock", "max_size_gb": 2, "mock_bandwidth_gb": 10}


def test_every_documented_key_is_read() -> None:
    config = parse_adapter(
        {
            **FS,
            "num_workers": 32,
            "relative_tmp_dir": ".tmp",
            "use_odirect": True,
            "read_ahead_size": 1 << 20,
            "io_engine": "io_uring",
            "max_capacity_gb": 1.5,
            "persist_enabled": False,
            "timeout_seconds": 2,
            "eviction": {"eviction_policy": "LRU", "trigger_watermark": 0.9, "eviction_ratio": 0.1},
        },
        1,
    )
    assert config.name == "fs_native_1"
    assert isinstance(config, FsNativeConfig)
    assert (config.base_path, config.num_workers, config.relative_tmp_dir) == ("/nowhere/at/all", 32, ".tmp")
    assert (config.use_odirect, config.read_ahead_size, config.io_engine) == (True, 1 << 20, "io_uring")
    assert (config.limit_bytes, config.persist_enabled, config.timeout_seconds) == (3 * GIB // 2, False, 2.0)
    assert config.eviction == EvictionConfig("LRU", 0.9, 0.1)


def test_defaults() -> None:
    config = parse_adapter(FS, 0)
    assert isinstance(config, FsNativeConfig)
    assert config.num_workers == 4 and config.use_odirect is False
    assert (config.limit_bytes, config.persist_enabled) == (None, True)
    assert (config.timeout_seconds, config.eviction) == (30.0, None)
    eviction = {"eviction_policy": "LRU"}
    config = parse_adapter({**MOCK, "eviction": eviction, "max_capacity_gb": 1}, 0)
    assert config.eviction == EvictionConfig("LRU", 0.8, 0.2)
    assert config.limit_bytes == GIB
    assert parse_adapter(MOCK, 0).limit_bytes == 2 * GIB


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"base_path": "/x"}, ["--l2-adapter 1", '"type"', "fs, fs_native, "]),
        ([1], ["must be a JSON object"]),
        ({"type": "fs_nativ"}, ["unknown adapter type", "did you mean fs_native?"]),
        ({"type": 3}, ['"type"']),
        ({"type": "fs_native"}, ['"base_path" is required']),
        ({**FS, "num_worker": 3}, ['"num_worker"', "did you mean num_workers?", "allowed are base_path, eviction,"]),
        ({**FS, "Use_ODirect": True}, ["did you mean use_odirect?"]),
        ({**FS, "num_workers": 0}, ['"num_workers" must be a whole number from 1 to 1024; got 0']),
        ({**FS, "num_workers": True}, ["num_workers"]),
        ({**FS, "num_workers": "4"}, ["num_workers", "'4'"]),
        ({**FS, "use_odirect": "true"}, ['"use_odirect" must be true or false']),
        ({**FS, "base_path": ""}, ["base_path", "non-empty"]),
        ({**FS, "read_ahead_size": 0}, ["read_ahead_size"]),
        ({**FS, "max_capacity_gb": -1}, ["max_capacity_gb"]),
        ({**FS, "max_capacity_gb": float("nan")}, ["max_capacity_gb"]),
        ({**FS, "max_capacity_gb": 1e-10}, ['"max_capacity_gb" of 1e-10 is less than a byte; 0 is no limit']),
        ({**FS, "base_path": "/x\0y"}, ['(fs_native): "base_path" must not have the character NUL']),
        ({"type": "raw_block", "device_path": "/x\0y", "slot_bytes": 8192}, ['"device_path" must not have']),
        ({"type": "plugin", "module_path": "x", "class_name": "X", "adapter_params": {"a": ["\0"]}}, ["NUL"]),
        ({**FS, "serde": [{"type": "plugin", "factory": "a:b\0"}]}, ['"serde" must not have the character NUL']),
        ({**FS, "serde": 3}, ['"serde" must be an object such as', "or a list of them; got 3"]),
        ({**FS, "serde": [3]}, ['"serde" must be an object such as']),
        ({**FS, "serde": []}, ['"serde" must have 1 to 8 types']),
        ({**FS, "timeout_seconds": 0}, ["timeout_seconds", "above 0"]),
        ({**FS, "serde": {"type": "turboquant"}}, ['the serde type "turboquant" is not built yet']),
        ({**FS, "eviction": {"eviction_policy": "LRU"}}, ['"eviction" needs "max_capacity_gb"']),
        ({**FS, "eviction": "LRU"}, ['"eviction" must be an object']),
        ({**MOCK, "eviction": {}}, ["eviction", '"eviction_policy" is required']),
        (
            {**MOCK, "eviction": {"eviction_policy": "lru"}},
            ["one of LRU, IsolatedLRU, S3FIFO, noop", "did you mean LRU?"],
        ),
        ({**MOCK, "eviction": {"eviction_policy": "LRU", "ratio": 1}}, ['"ratio"', "did you mean eviction_ratio?"]),
        ({**MOCK, "eviction": {"eviction_policy": "LRU", "trigger_watermark": 2}}, ["trigger_watermark"]),
        ({"type": "fs", "base_path": "/x", "num_workers": 4}, ['unknown key "num_workers"', "read_ahead_size"]),
        ({"type": "fs"}, ['"base_path" is required']),
        ({"type": "plugin", "module_path": "x"}, ['"class_name" is required']),
        ({"type": "plugin", "module_path": "x", "class_name": "X", "adapter_params": "y"}, ["must be a JSON object"]),
        ({"type": "native_plugin", "module_path": "x", "class_name": "X", "config_class_name": "Y"}, ["unknown key"]),
        ({**MOCK, "max_size_gb": 0}, ["max_size_gb", "above 0"]),
        ({**MOCK, "base_path": "/x"}, ['unknown key "base_path"']),
    ],
)
def test_what_is_wrong_is_refused_in_one_sentence(spec: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_adapter(spec, 0)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert message.startswith("--l2-adapter 1") and message.endswith(".") and "\n" not in message


def refusal(spec: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_adapter(spec, 0)
    return caught.value


DOCUMENTED = ("infinistore", "p2p")


@pytest.mark.parametrize("name", DOCUMENTED)
def test_what_is_not_built_is_refused_by_name(name: str) -> None:
    sentence = str(refusal({"type": name}))
    assert f'"{name}" is not built yet ({unbuilt.ADAPTERS[name]}); built are fs, fs_native, ' in sentence
    assert set(unbuilt.ADAPTERS) == set(DOCUMENTED)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("redis", "did you mean resp?)"),
        ("Valkey", "did you mean resp?)"),
        ("disk", "did you mean fs_native?)"),
        ("file", "did you mean fs_native?)"),
        ("local", "did you mean fs_native?)"),
        ("nixl", "did you mean nixl_store?)"),
        ("mooncake", "did you mean mooncake_store?)"),
        ("gds", 'did you mean nixl_store with "backend": "GDS"?)'),
        ("aws", "did you mean s3?)"),
        ("minio", "did you mean s3?)"),
        ("rawblock", "did you mean raw_block?)"),
        ("nixl-store", "did you mean nixl_store?)"),
    ],
)
def test_what_people_call_a_type_leads_to_its_name(name: str, said: str) -> None:
    sentence = str(refusal({"type": name}))
    assert sentence.startswith(f'--l2-adapter 1: unknown adapter type "{name}" (')
    assert said in sentence


def test_aliases_name_what_the_documents_name() -> None:
    assert {meant for meant, _ in unbuilt.ADAPTER_ALIASES.values()} <= {*TYPES, *unbuilt.ADAPTERS}
    assert not set(unbuilt.ADAPTER_ALIASES) & {*TYPES, *unbuilt.ADAPTERS}
    assert not set(TYPES) & set(unbuilt.ADAPTERS)


def test_all_that_is_wrong_with_an_adapter_is_reported_at_once() -> None:
    eviction = {"eviction_policy": "lru", "ratio": 1}
    spec = {
        "type": "fs_native",
        "base_pth": "/x",
        "num_workers": 0,
        "eviction": eviction,
        "serde": "zstd",
        "use_odirect": 1,
    }
    assert [problem.split(":")[1].split(" ")[1] for problem in refusal(spec).problems] == [
        "unknown",  # base_pth: base_path is not asked for as well
        '"num_workers"',
        '"use_odirect"',
        "unknown",  # ratio
        '"eviction_policy"',
        '"serde"',
    ]


def test_common_keys_without_an_effect_are_reported() -> None:
    eviction = {"eviction_policy": "noop", "trigger_watermark": 0.8, "eviction_ratio": 0.5}
    (note,) = parse_adapter({**MOCK, "eviction": eviction}, 0).notes()
    assert (
        note
        == '--l2-adapter 1 (mock): "eviction_ratio" has no effect under "eviction_policy" "noop", which evicts nothing.'
    )
    assert parse_adapter({**MOCK, "eviction": {**eviction, "eviction_policy": "LRU"}}, 0).notes() == []


@pytest.mark.parametrize("path", ["/abs", "../out", "a/../../out", "quarantine", ".lmcache/x", "a/b/c"])
def test_temporary_files_stay_inside_the_folder(path: str) -> None:
    with pytest.raises(ConfigError, match="relative_tmp_dir"):
        build(parse_adapter({**FS, "relative_tmp_dir": path}, 0))


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ({"num_lookup_workers": 2}, ["num_lookup_workers"]),
        ({"num_store_workers": 3, "num_load_workers": 8, "iouring_queue_depth": 8}, ["iouring_queue_depth"]),
        (
            {"io_engine": "io_uring", "num_store_workers": 3, "num_load_workers": 8, "iouring_queue_depth": 8},
            ["num_store_workers", "num_load_workers"],
        ),
        (
            {"meta_enable_periodic": False, "meta_checkpoint_interval_sec": 9, "meta_idle_quiet_ms": 9},
            ["meta_checkpoint_interval_sec", "meta_idle_quiet_ms"],
        ),
        ({"meta_checkpoint_interval_sec": 9, "meta_idle_quiet_ms": 9, "enable_zero_copy": False}, []),
        ({}, []),
    ],
)
def test_a_key_without_effect_is_accepted_and_said(tmp_path: Path, settings: dict[str, Any], idle: list[str]) -> None:
    (tmp_path / "device").write_bytes(bytes(1 << 20))
    device = {"device_path": str(tmp_path / "device"), "slot_bytes": 8192, "use_odirect": False}
    config = parse_adapter({"type": "raw_block", "meta_total_bytes": 65536, **device, **settings}, 1)
    found = [sentence for sentence in check(config) if "has no effect" in sentence]
    assert [sentence.split('"')[1] for sentence in found] == idle
    assert all(sentence.startswith("--l2-adapter 2 (raw_block): ") for sentence in found)


def test_lookups_of_dax_need_no_workers(tmp_path: Path) -> None:
    (tmp_path / "device").touch()
    device = {"device_path": str(tmp_path / "device"), "slot_bytes": 4096, "max_dax_size_gb": 0.001}
    (sentence,) = check(parse_adapter({"type": "dax", **device, "num_lookup_workers": 4, "num_load_workers": 2}, 0))
    assert sentence.startswith('--l2-adapter 1 (dax): "num_lookup_workers" has no effect')


@pytest.mark.parametrize(
    ("keys", "is_shared"),
    [
        ({"type": "fs_native", "base_path": "/kv"}, False),
        ({"type": "resp", "host": "valkey", "port": 6379}, True),
        ({"type": "s3", "s3_endpoint": "s3://bucket", "s3_region": "eu-central-1"}, True),
        ({"type": "nixl_store", "backend": "OBJ", "backend_params": {"bucket": "b"}, "pool_size": 8}, True),
        (
            {
                "type": "nixl_store",
                "backend": "POSIX",
                "backend_params": {"file_path": "/kv", "use_direct_io": "false"},
                "pool_size": 8,
            },
            False,
        ),
    ],
)
def test_which_adapters_other_servers_read_as_well(keys: dict[str, Any], is_shared: bool) -> None:
    assert parse_adapter(keys, 0).is_shared == is_shared
