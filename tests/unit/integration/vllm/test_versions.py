"""An engine is known by what it has, not by its number: what it lacks is replaced, or it runs uncached and says so."""

from __future__ import annotations

import abc
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.integration.vllm import versions
from lmcache.integration.vllm.block_tables import BlockTables

HOOKS = versions.HOOKS


def base(*more: str, without: str = "", **module: Any) -> Any:
    """A module with a connector base class of these methods."""
    names = {*HOOKS, "bind_gpu_block_pool", *more} - {without}
    return SimpleNamespace(KVConnectorBase_V1=type("Base", (), dict.fromkeys(names, lambda self: None)), **module)


def test_an_engine_that_hands_over_its_pool_alone_is_cached() -> None:
    engine = versions.probe(base(), version="1")
    assert engine.refusal == ""
    assert (engine.binds_manager, engine.transfer_results, engine.follows_sleep) == (False, None, False)


def test_what_a_later_engine_offers_is_found() -> None:
    sleep = ("unregister_kv_caches", "restore_kv_caches")
    results = type("Results", (), {})
    engine = versions.probe(base("bind_kv_cache_manager", *sleep, KVConnectorTransferResults=results), version="1")
    assert (engine.binds_manager, engine.transfer_results, engine.follows_sleep) == (True, results, True)


@pytest.mark.parametrize("hook", HOOKS)
def test_without_a_call_that_exactness_needs_an_engine_runs_uncached(hook: str) -> None:
    engine = versions.probe(base(without=hook), version="9.9")
    assert engine.refusal == (
        f"vLLM 9.9 lacks {hook}, without which KV cannot be restored exactly; use a version of vLLM that `lmcache "
        "doctor` names as tested."
    )


def test_an_engine_that_hands_nothing_over_runs_uncached() -> None:
    assert "bind_kv_cache_manager" in versions.probe(base(without="bind_gpu_block_pool"), version="1").refusal


def test_an_engine_that_demands_unknown_methods_starts_and_runs_uncached() -> None:
    class Demanding(abc.ABC):
        @abc.abstractmethod
        def teleport_kv(self, blocks: int) -> None: ...

    class Connector(Demanding):
        pass

    assert versions.fill_unknown_methods(Connector) == ("teleport_kv",)
    assert Connector().teleport_kv(3) is None  # type: ignore[abstract]
    engine = versions.EngineInterface("9.9", (), unknown=("teleport_kv",))
    assert engine.refusal.startswith("vLLM 9.9 calls teleport_kv, which this version of LMCache does not know; ")


def test_hits_are_split_by_the_engines_names() -> None:
    names = SimpleNamespace(HOST="host", DISK="disk")
    engine = versions.EngineInterface("1", (), hit_sources=names)
    assert engine.split_hit(256, 512) == {"host": 256, "disk": 512}
    assert engine.split_hit(256, 0) == {"host": 256}


def test_values_of_engines_that_say_less() -> None:
    assert versions.boundary_states(SimpleNamespace()) == {}
    assert versions.boundary_states(SimpleNamespace(kv_connector_block_state=None)) == {}
    assert versions.failed_requests(SimpleNamespace()) == frozenset()
    assert versions.failed_requests(SimpleNamespace(failed_recving={"a"})) == {"a"}
    assert versions.is_transferable(SimpleNamespace())
    assert not versions.is_transferable(SimpleNamespace(host_resident=True))
    assert not versions.is_transferable(SimpleNamespace(enable_kv_transfer=False))
    assert versions.missing_in_pool(SimpleNamespace(blocks=[], null_block=0, num_gpu_blocks=1)) == (
        "get_num_free_blocks",
        "touch",
        "free_blocks",
    )


def step(
    new: dict[str, tuple[list[int], ...]] | None = None,
    added: dict[str, tuple[list[int], ...] | None] | None = None,
    *,
    resumed: tuple[str, ...] = (),
    finished: tuple[str, ...] = (),
) -> Any:
    return SimpleNamespace(
        finished_req_ids=set(finished),
        scheduled_new_reqs=[SimpleNamespace(req_id=name, block_ids=ids) for name, ids in (new or {}).items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(added or {}), new_block_ids=list((added or {}).values()), resumed_req_ids=set(resumed)
        ),
    )


def test_block_tables_follow_the_steps_of_an_engine() -> None:
    tables = BlockTables()
    tables.follow(step(new={"a": ([1, 2],), "b": ([3],)}))
    tables.follow(step(added={"a": ([4],), "b": None}))
    assert (tables("a"), tables("b"), tables("c")) == (([1, 2, 4],), ([3],), ())
    tables.follow(step(added={"a": ([7, 8],)}, resumed=("a",), finished=("b",)))
    assert (tables("a"), tables("b")) == (([7, 8],), ())
    tables.follow(step(added={"b": ([9],)}))  # it was never seen to begin: nothing is known of it
    assert tables("b") == ()


def test_the_engines_own_lists_are_not_kept() -> None:
    tables, ids = BlockTables(), [1]
    tables.follow(step(new={"a": (ids,)}))
    tables.follow(step(added={"a": ([2],)}))
    assert ids == [1]
