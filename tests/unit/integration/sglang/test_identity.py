"""Which engines may share pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from lmcache.errors import LayoutRefused
from lmcache.integration.sglang.identity import engine_identity, pool_place, weights_identity
from support.sglang_stand_in import StorageConfig


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(10_000))
    return tmp_path


def arguments(folder: Path, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"model_path": str(folder), "revision": None, "load_format": "auto", **more})


def test_weights_are_known_by_their_files_and_settings(folder: Path) -> None:
    first = weights_identity(arguments(folder), "")
    assert weights_identity(arguments(folder), "") == first
    others = [
        weights_identity(arguments(folder, dtype="float16"), ""),
        weights_identity(arguments(folder, kv_cache_dtype="fp8_e5m2"), ""),
        weights_identity(arguments(folder, speculative_draft_model_path=str(folder)), ""),
    ]
    (folder / "config.json").write_text('{"rope_theta": 1}')
    others.append(weights_identity(arguments(folder), ""))
    (folder / "model.safetensors").write_bytes(bytes(9_999) + b"x")
    others.append(weights_identity(arguments(folder), ""))
    assert len({first, *others}) == 6


def test_another_version_of_the_engine_finds_no_page() -> None:
    versions = ["0.5.23", "0.5.24", "0.5.23.post1", "0.5.23+gabc1234", "0.6.0"]
    assert engine_identity("0.5.23", "w") == engine_identity("0.5.23", "w")
    assert len({engine_identity(version, "w") for version in versions}) == len(versions)


def test_a_name_stands_for_weights_that_cannot_be_read(folder: Path) -> None:
    named = weights_identity(arguments(folder, load_format="dummy"), "a")
    assert named != weights_identity(arguments(folder, load_format="dummy"), "b")
    assert named != weights_identity(arguments(folder, load_format="dummy", dtype="float16"), "a")
    assert weights_identity(None, "a") == weights_identity(None, "a")


@pytest.mark.parametrize("more", [{"load_format": "LoadFormat.DUMMY"}, {"model_path": "nobody/nothing"}])
def test_weights_that_are_not_known_are_refused(folder: Path, more: dict[str, Any]) -> None:
    with pytest.raises(LayoutRefused, match=r"lmcache\.mp\.weights_id"):
        weights_identity(arguments(folder, **more), "")
    with pytest.raises(LayoutRefused, match="does not tell which weights"):
        weights_identity(None, "")


def test_every_rank_has_a_place_of_its_own() -> None:
    config = StorageConfig({}, tp_size=2, pp_size=3, attn_cp_size=2)
    places = [
        pool_place(replace(config, tp_rank=tp, pp_rank=pp, attn_cp_rank=cp), "kv")
        for tp in range(2)
        for pp in range(3)
        for cp in range(2)
    ]
    assert {place.kv_ranks for place in places} == {12}
    assert sorted(place.kv_rank for place in places) == list(range(12))


def test_replicas_share_a_place_but_for_recurrent_state() -> None:
    replicas = [StorageConfig({}, tp_size=4, tp_rank=rank, is_mla_model=True) for rank in range(4)]
    assert {tuple(pool_place(config, "kv")) for config in replicas} == {(1, 0)}
    assert [pool_place(config, "mamba").kv_rank for config in replicas] == [0, 1, 2, 3]
