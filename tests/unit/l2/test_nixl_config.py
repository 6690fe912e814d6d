"""The keys of the adapters on NIXL. The package itself is not needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lmcache.core.limits import GIB
from lmcache.errors import ConfigError, ResourceError
from lmcache.l2.adapter_types import check, parse_adapter
from lmcache.l2.adapters import nixl_agent
from lmcache.l2.adapters.nixl_config import NixlDynamicConfig

PARAMS = {"file_path": "/data/lmcache/l2", "use_direct_io": "false"}
DYNAMIC: dict[str, Any] = {"type": "nixl_store_dynamic", "backend": "POSIX", "backend_params": PARAMS}


def with_params(**params: object) -> dict[str, Any]:
    return {**DYNAMIC, "backend_params": {**PARAMS, **params}}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"type": "nixl_store_dynamic", "backend": "POSIX"}, ['"backend_params" is required']),
        ({**DYNAMIC, "backend": "OBJ"}, ['"backend" must be one of POSIX, GDS, GDS_MT, HF3FS']),
        ({**DYNAMIC, "backend": "GSD"}, ["did you mean GDS?"]),
        ({**DYNAMIC, "backend_params": {}}, ['"backend_params" needs "file_path" for "backend" "POSIX"']),
        ({**DYNAMIC, "backend_params": {"file_path": "/x"}}, ['needs "use_direct_io"']),
        (with_params(use_direct_io="yes"), ['"use_direct_io" in "backend_params" must be "true" or "false"']),
        (with_params(use_direct_io=True), ["must be an object whose values are strings"]),
        (with_params(max_capacity_gb="much"), ['"max_capacity_gb" in "backend_params" must be a number', '"much"']),
        (with_params(max_capacity_gb="nan"), ['"max_capacity_gb" in "backend_params" must be a number']),
        ({**DYNAMIC, "eviction": {"eviction_policy": "LRU"}}, ['"eviction" needs "max_capacity_gb"']),
        ({**DYNAMIC, "pool_size": 3}, ['unknown key "pool_size"']),
    ],
)
def test_what_is_wrong_is_refused_in_one_sentence(spec: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_adapter(spec, 0)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert message.startswith("--l2-adapter 1") and message.endswith(".") and "\n" not in message


def test_capacity_is_the_lower_of_both_keys_for_it() -> None:
    def limit(outer: float, inner: str) -> int | None:
        return parse_adapter({**with_params(max_capacity_gb=inner), "max_capacity_gb": outer}, 0).limit_bytes

    assert limit(0, "10") == limit(20, "10") == limit(10, "0") == limit(10, "20") == 10 * GIB
    assert limit(0, "0") is None and parse_adapter(DYNAMIC, 0).limit_bytes is None


def test_a_pool_knows_both_keys_for_its_capacity_too() -> None:
    pool = {**with_params(max_capacity_gb="2"), "type": "nixl_store", "pool_size": 3}
    assert parse_adapter(pool, 0).limit_bytes == 2 * GIB
    with pytest.raises(ConfigError, match='"max_capacity_gb" in "backend_params" must be a number'):
        parse_adapter({**pool, "backend_params": {**PARAMS, "max_capacity_gb": "much"}}, 0)


def test_parameters_of_the_other_kind_of_backend_are_said_to_have_no_effect() -> None:
    objects = {"type": "nixl_store", "backend": "OBJ", "pool_size": 3, "backend_params": PARAMS}
    said = " ".join(parse_adapter(objects, 0).notes())
    assert '"file_path" in "backend_params" has no effect on "backend" "OBJ"' in said and '"use_direct_io"' in said
    assert '"object_prefix" in "backend_params" has no' in parse_adapter(with_params(object_prefix="a"), 0).notes()[0]
    assert not parse_adapter(DYNAMIC, 0).notes()


def test_what_is_not_known_goes_to_the_plugin() -> None:
    config = parse_adapter(with_params(max_capacity_gb="1", use_uring="true"), 0)
    assert isinstance(config, NixlDynamicConfig)
    assert config.plugin_params == {"use_uring": "true"} and config.folder == "/data/lmcache/l2"


def test_a_missing_package_is_one_sentence_that_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nixl_agent, "BUILDS", ())
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ResourceError) as caught:
        check(parse_adapter(with_params(file_path=str(tmp_path)), 0))
    assert "pip install --no-deps 'nixl>=1.5.1,<2'" in str(caught.value) and "\n" not in str(caught.value)


def test_a_refusal_shows_no_secret() -> None:
    params = {"secret_key": "planted-secret", "endpoint_override": "http://user:planted-secret@host", "region": 5}
    with pytest.raises(ConfigError) as caught:
        parse_adapter({"type": "nixl_store", "backend": "OBJ", "pool_size": 1, "backend_params": params}, 0)
    assert "'region': 5" in str(caught.value) and "planted" not in str(caught.value)
