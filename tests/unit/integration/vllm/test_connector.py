"""What the connector makes of the engine's calls, where engines and their runners differ."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1
from vllm.v1.core.sched.scheduler import Scheduler

from lmcache.core import limits
from lmcache.integration.engine.connector_metadata import ConnectorMetadata
from lmcache.integration.engine.worker_side import EndedLoads
from lmcache.integration.vllm import connector as module
from lmcache.integration.vllm import vllm_v1_adapter as impl_module
from lmcache.integration.vllm.connector import LMCacheMPConnector
from lmcache.integration.vllm.lmcache_connector_v1 import LMCacheConnectorV1Dynamic
from lmcache.integration.vllm.settings import ConnectorSettings
from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl
from polling import until
from support.telemetry_proxy import telemetry_proxy
from unit.integration.vllm.fakes import request
from unit.integration.vllm.test_new_weights import engine_of, lookups, name_of

pytestmark = pytest.mark.engine


class FakeWorker:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start_loads(self, metadata: Any, *, idle_step: bool) -> None:
        self.calls.append(("loads", idle_step))

    def start_stores(self, metadata: Any) -> None:
        self.calls.append("stores")

    def ended_loads(self) -> EndedLoads:
        return EndedLoads({"a"}, {"a"}, {3})

    def await_stores_read(self) -> None:
        self.calls.append("read")

    def close(self) -> None:
        self.calls.append("closed")


def connector(**fields: Any) -> Any:
    made = LMCacheMPConnector.__new__(LMCacheMPConnector)
    values: dict[str, Any] = {
        "worker_side": FakeWorker(),
        "scheduler_side": None,
        "_failed_blocks": set(),
        "_block_tables": None,
    }
    for name, value in {**values, **fields}.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("idle", "calls"),
    [(False, [("loads", False), "stores"]), (True, [("loads", True), "stores"])],
)
@pytest.mark.parametrize("saves_when_idle", [True, False], ids=["always", "not in idle steps"])
def test_stores_begin_once_whatever_the_engine_calls_in_a_step(
    idle: bool, calls: list[Any], saves_when_idle: bool
) -> None:
    """Some engines do not call `wait_for_save` in a step without a forward pass."""
    made = connector()
    made.bind_connector_metadata(ConnectorMetadata(idle=idle))
    made.start_load_kv(SimpleNamespace())
    assert made.worker_side.calls == (calls if idle else calls[:1])  # not before the pass has written the blocks
    if saves_when_idle or not idle:
        made.wait_for_save()
    assert made.worker_side.calls == calls


@pytest.mark.parametrize(
    ("loads", "stores", "requires"), [(True, True, False), (False, True, True), (True, False, False)]
)
def test_only_an_engine_that_stores_for_others_has_to_deliver(loads: bool, stores: bool, requires: bool) -> None:
    role = SimpleNamespace(is_kv_consumer=loads, is_kv_producer=stores)
    assert connector(_kv_transfer_config=role).requires_kv_delivery is requires


def test_what_is_handed_over_is_told_in_the_answer() -> None:
    told = {"lmcache.mp.source": {"tokens": 256}}
    side = SimpleNamespace(request_finished=lambda request, blocks: told)
    assert connector(scheduler_side=side).request_finished("request", [1]) == (False, told)
    assert connector().request_finished("request", [1]) == (False, None)


def test_ended_loads_in_both_forms() -> None:
    made = connector()
    results = made.get_transfer_results(set())
    assert (results.finished_recving, results.failed_recving) == ({"a"}, {"a"})
    assert made.get_block_ids_with_load_errors() == {3}
    assert made.get_finished(set()) == (None, {"a"})
    assert made.get_block_ids_with_load_errors() == {3}
    assert made.get_block_ids_with_load_errors() == set()


def test_an_engine_that_hands_over_its_pool_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[Any] = []
    side = SimpleNamespace(bind=lambda pool, table: bound.append((pool, table)), step_metadata=lambda step: "orders")
    pool = SimpleNamespace(
        **dict.fromkeys(("blocks", "null_block", "num_gpu_blocks", "get_num_free_blocks", "touch", "free_blocks")),
        reset_prefix_cache=lambda: True,
    )
    monkeypatch.setattr(module, "ENGINE", replace(module.ENGINE, binds_manager=False))
    made = connector(scheduler_side=side)
    made.bind_gpu_block_pool(pool)
    empty = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
    new = SimpleNamespace(req_id="a", block_ids=([1, 2],))
    step = SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=[new], scheduled_cached_reqs=empty)
    assert made.build_connector_meta(step) == "orders"
    assert bound[0][0] is pool
    assert bound[0][1]("a") == ([1, 2],)


def test_a_pool_whose_blocks_cannot_be_pinned_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    closed: list[bool] = []
    made = connector(scheduler_side=SimpleNamespace(close=lambda: closed.append(True)))
    manager = SimpleNamespace(block_pool=SimpleNamespace(), get_block_ids=lambda request_id: ())
    made.bind_kv_cache_manager(manager)
    assert closed
    assert made.scheduler_side is None
    assert "This engine runs uncached: The engine's block pool has no blocks, null_block" in caplog.text


def test_memory_that_goes_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(LMCacheMPConnector, "register_kv_caches", lambda self, caches: registered.append(caches))
    made = connector(_kv_caches={"layer": "tensor"})
    worker = made.worker_side
    made.unregister_kv_caches()
    made.unregister_kv_caches()
    assert worker.calls == ["read", "closed"]
    assert made.worker_side is None
    made.restore_kv_caches()
    assert registered == [{"layer": "tensor"}]
    assert LMCacheMPConnector.supports_sleep_mode(None)


def test_the_name_for_an_engine_inside_needs_the_engines_block_tables(caplog: pytest.LogCaptureFixture) -> None:
    side = SimpleNamespace(close=lambda: None, matched_tokens=lambda request, computed: (256, True))
    impl = LMCacheConnectorV1Impl.__new__(LMCacheConnectorV1Impl)
    for name, value in {"_inner": connector(scheduler_side=side), "_parent": SimpleNamespace()}.items():
        setattr(impl, name, value)
    impl._is_bound, impl._whole_hits, impl._loading = False, set(), set()  # noqa: SLF001
    assert impl.get_num_new_matched_tokens(SimpleNamespace(request_id="a"), 0) == 0
    impl.update_state_after_alloc(SimpleNamespace(request_id="a"), 0)
    assert caplog.text.count("use LMCacheMPConnector") == 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What vLLM makes connectors with, of a version that lacks something."""
    monkeypatch.setattr(module, "ENGINE", replace(module.ENGINE, missing=("teleport_kv",)))
    monkeypatch.setattr(module, "configure_logs", lambda level: None)  # of this process: its logs are read here
    transfer = SimpleNamespace(kv_connector_extra_config={}, engine_id="engine")
    return SimpleNamespace(kv_transfer_config=transfer, parallel_config=SimpleNamespace(world_size=1))


@pytest.mark.parametrize("made", [LMCacheMPConnector, LMCacheConnectorV1Dynamic, LMCacheConnectorV1Impl])
def test_an_engine_that_lacks_something_is_said_once_and_goes_on(
    made: Any, engine: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    parent = SimpleNamespace(_kv_cache_config=None, _kv_cache_manager=None)
    last = parent if made is LMCacheConnectorV1Impl else None
    worker, scheduler = (made(engine, role, last) for role in (KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER))
    said = [record.getMessage() for record in caplog.records if "uncached" in record.getMessage()]
    assert len(said) == 1 and "lacks teleport_kv, without which KV cannot be restored exactly" in said[0]
    request = SimpleNamespace(request_id="a", num_tokens=512)
    assert scheduler.get_num_new_matched_tokens(request, 0) in (0, (0, False))
    worker.register_kv_caches({})
    worker.bind_connector_metadata(scheduler.build_connector_meta(SimpleNamespace()))
    worker.start_load_kv(None)
    worker.wait_for_save()
    assert worker.get_finished(set()) == (None, None)
    assert scheduler.request_finished(request, []) == (False, None)
    for side in (worker, scheduler):
        side.shutdown()


def test_where_events_are_off_what_is_said_of_them_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    settings = ConnectorSettings.read({"lmcache.mp.kv_events_shared_l2": True})
    engine = connector(_vllm_config=SimpleNamespace(kv_events_config=None), _settings=settings)
    assert engine._events(None) is None  # noqa: SLF001
    assert "lmcache.mp.kv_events_shared_l2 has no effect" in caplog.text


@pytest.mark.parametrize(
    ("stores", "rank", "mla", "kv_ranks"),
    [(True, 1, False, [(2, 1)]), (True, 0, True, [(1, 0)]), (True, 1, True, []), (False, 0, False, [])],
    ids=["rank 1", "first of MLA", "second of MLA", "consumer"],
)
def test_a_proxy_is_told_of_each_request_also_where_nothing_is_cached(
    engine: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    stores: bool,
    rank: int,
    mla: bool,
    kv_ranks: list[tuple[int, int]],
) -> None:
    engine.kv_transfer_config.is_kv_producer = stores
    engine.parallel_config = SimpleNamespace(world_size=2, tensor_parallel_size=2, rank=rank)
    engine.model_config = SimpleNamespace(model="model", use_mla=mla)
    monkeypatch.setattr(limits, "TELEMETRY_POST_SECONDS", 60.0)  # this machine may stand still
    with telemetry_proxy() as proxy:
        monkeypatch.setenv("LMCACHE_REQUEST_TELEMETRY_TYPE", "fastapi")
        monkeypatch.setenv("LMCACHE_REQUEST_TELEMETRY_ENDPOINT", proxy.url)
        LMCacheMPConnector(engine, KVConnectorRole.SCHEDULER, None).shutdown()
        worker = LMCacheMPConnector(engine, KVConnectorRole.WORKER, None)
        for finished in (worker.get_finished, worker.get_transfer_results):
            finished(set())
            finished({finished.__name__})
        if kv_ranks:
            until(lambda: proxy.told == ["get_finished", "get_transfer_results"])
        worker.shutdown()
    assert sorted({(event["world_size"], event["kv_rank"]) for event in proxy.events}) == kv_ranks


def test_an_engine_inside_ends_its_server_although_its_own_class_has_no_end(
    engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[object] = []
    monkeypatch.setattr(LMCacheMPConnector, "shutdown", lambda self: ended.append(self))
    parent = SimpleNamespace(_kv_cache_config=None)
    LMCacheConnectorV1Impl(engine, KVConnectorRole.SCHEDULER, parent)
    parent.shutdown()
    assert len(ended) == 1


@pytest.mark.parametrize("blocks_in_use", [False, True])
def test_a_reset_of_vllms_own_class_gives_later_requests_another_name(
    monkeypatch: pytest.MonkeyPatch, blocks_in_use: bool
) -> None:
    engine = engine_of()
    monkeypatch.setattr(impl_module, "_InnerConnector", lambda *_: connector(scheduler_side=engine.side))
    role = SimpleNamespace(is_kv_producer=True, is_kv_consumer=True, get_from_extra_config=lambda key, default: default)
    monkeypatch.setattr(KVConnectorBase_V1, "__init__", lambda self, **_: setattr(self, "_kv_cache_config", None))
    config = SimpleNamespace(kv_transfer_config=role, parallel_config=SimpleNamespace(world_size=1))
    its_scheduler = SimpleNamespace(
        connector=LMCacheConnectorV1(config, KVConnectorRole.SCHEDULER, None), log_stats=False
    )
    if blocks_in_use:
        engine.pool.touch([engine.pool.blocks[1]])
    engine.side.on_new_request(request("before", 600))
    assert Scheduler.reset_connector_cache(its_scheduler) is not blocks_in_use
    engine.side.on_new_request(request("after", 600))
    identities = [identity for _, _, identity in lookups(engine)]
    assert identities == ([b""] if blocks_in_use else [b"", name_of(1)])


def test_vllms_own_class_with_use_native_needs_parts_of_lmcache_that_are_not_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(KVConnectorBase_V1, "__init__", lambda self, **_: None)
    role = SimpleNamespace(get_from_extra_config={"use_native": True}.get)
    with pytest.raises(ImportError) as refused:
        LMCacheConnectorV1(SimpleNamespace(kv_transfer_config=role), KVConnectorRole.SCHEDULER, None)
    assert (refused.value.name or "").startswith("lmcache.")
