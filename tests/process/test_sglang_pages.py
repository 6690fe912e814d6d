"""SGLang's storage backend against real servers, with a stand-in for SGLang: a page is exactly what was stored, or it
is missing, in either transfer mode and whatever becomes of the server."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lmcache.errors import ConfigError  # noqa: E402
from lmcache.testing.processes import CacheServer  # noqa: E402
from polling import STALL_SECONDS, until  # noqa: E402
from process.support import checked_server  # noqa: E402
from support.sglang_stand_in import (  # noqa: E402
    HostPool,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    StorageConfig,
    extra_config,
    install,
    page_keys,
)

MakeBackend = Callable[..., Any]
PATIENT_SECONDS = 30.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    with checked_server(tmp_path, 0.0625) as server:
        yield server


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeBackend]:
    install(monkeypatch)
    from lmcache.integration.sglang import page_pool
    from lmcache.integration.sglang.hicache import LMCacheHiCacheStorage

    # A server that stands still with this machine is not one that is away.
    for name in ("START_SECONDS", "PROBE_SECONDS", "LOAD_SECONDS"):
        monkeypatch.setattr(page_pool, name, PATIENT_SECONDS)
    made: list[Any] = []

    def make(port: int, pool: HostPool | None = None, *, config: Any = (), **settings: Any) -> Any:
        storage = LMCacheHiCacheStorage(StorageConfig(extra_config(port, **settings), **dict(config)), {})
        made.append(storage)
        if pool is not None:
            storage.register_mem_pool_host(pool)
        return storage

    yield make
    for storage in made:
        until(lambda storage=storage: idle(storage))
        storage.close()


def idle(storage: Any) -> bool:
    try:
        storage.check_idle()
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("mode", ["shm", "socket"])
@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_come_back_bit_by_bit(server: CacheServer, backend: MakeBackend, mode: str, layout: str) -> None:
    pool = HostPool(layout)
    storage = backend(server.port, pool, transfer_mode=mode)
    keys = page_keys(1, 2, 3, 4)
    assert storage.batch_exists(keys) == 0
    assert storage.batch_get_v1(keys, pool.indices(0, 1, 2, 3)) == [False] * 4
    pool.fill(2, 5, 3, 7)
    stored = [pool.page(number) for number in (2, 5, 3, 7)]
    assert storage.batch_set_v1(keys, pool.indices(2, 5, 3, 7)) == [True] * 4
    assert storage.batch_set_v1(keys[1:3], pool.indices(5, 3)) == [True] * 2  # they are there
    assert storage.batch_exists([*keys, *page_keys(9)]) == 4
    pool.wipe()
    assert storage.batch_get_v1([*keys, *page_keys(9)], pool.indices(8, 0, 15, 1, 6)) == [True] * 4 + [False]
    assert [pool.page(number) for number in (8, 0, 15, 1)] == stored
    assert all(pool.page(number) == bytes(pool.page_bytes) for number in (2, 3, 4, 5, 7, 9))
    (instance,) = server.status()["instances"]
    assert instance["transfer"][0]["mode"] == mode


def test_what_follows_a_page_that_is_missing_is_not_loaded(server: CacheServer, backend: MakeBackend) -> None:
    pool = HostPool()
    storage = backend(server.port, pool)
    pool.fill(0, 1)
    assert storage.batch_set_v1(page_keys(1, 3), pool.indices(0, 1)) == [True] * 2
    assert storage.batch_exists(page_keys(1, 2, 3)) == 1
    assert storage.batch_get_v1(page_keys(1, 2, 3), pool.indices(4, 5, 6)) == [True, False, False]
    assert storage.batch_get_v1(page_keys(2, 3), pool.indices(4, 5)) == [False, False]
    assert [storage.exists(key) for key in page_keys(1, 2, 3)] == [True, False, True]


def test_single_pages_as_tensors(server: CacheServer, backend: MakeBackend) -> None:
    pool = HostPool("layer_first")
    storage = backend(server.port, pool)
    value = torch.randint(0, 256, (pool.page_bytes,), dtype=torch.uint8)
    key, other = page_keys(1, 2)
    assert storage.set(key, value)
    assert storage.exists(key)
    target = torch.zeros_like(value)
    assert storage.get(key, target) is target
    assert torch.equal(target, value)
    assert storage.batch_get_v1([key], pool.indices(3)) == [True]
    assert pool.page(3) == value.numpy().tobytes()
    assert storage.get(other, target) is None
    assert storage.batch_get([key, other], [target, target])[1] is None
    assert storage.batch_set([other, key], [value, value])


@pytest.mark.parametrize("changed", [{"model_path": "/same"}, {"weight_version": "2"}])
def test_after_weights_were_replaced_the_engine_runs_uncached(
    server: CacheServer,
    backend: MakeBackend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, str],
) -> None:
    """By what SGLang notes; attached anew under another name of weights it caches again, without a name it does not."""
    noted: list[Any] = [("startup", {"page_size": 64})]
    context = SimpleNamespace(overrides_log=lambda: noted)
    module = ModuleType("sglang.srt.runtime_context")
    module.get_context = lambda: context  # type: ignore[attr-defined]
    module.get_server_args = lambda: SimpleNamespace(model_path="/model", revision=None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    pool, value = HostPool("layer_first"), torch.zeros(HostPool().page_bytes, dtype=torch.uint8)
    storage = backend(server.port, pool)
    keys = page_keys(1, 2)
    assert storage.batch_set_v1(keys, pool.indices(0, 1)) == [True] * 2
    noted.append(("another setting", {"page_size": 32}))
    assert storage.batch_exists(keys) == 2 and storage.get(keys[0], value) is value
    noted.append(("an update", changed))
    assert storage.batch_exists(keys) == 0 and not storage.exists(keys[0])
    assert storage.batch_get_v1(keys, pool.indices(0, 1)) == [False] * 2
    assert storage.batch_set_v1(page_keys(3), pool.indices(0)) == [False]
    assert storage.get(keys[0], value) is None and not storage.set(page_keys(4)[0], value)
    assert server.status()["l1"]["objects"] == 2
    assert caplog.text.count("This engine runs uncached, because its weights were replaced") == 1
    again = backend(server.port, pool, weights_id="w2")
    assert again.batch_exists(keys) == 0
    assert again.batch_set_v1(keys, pool.indices(0, 1)) == [True] * 2 and again.batch_exists(keys) == 2
    assert backend(server.port, pool, weights_id="").batch_set_v1(keys, pool.indices(0, 1)) == [False] * 2
    assert "they were replaced while it ran" in caplog.text


@pytest.mark.parametrize("wrong", [0, 1, -1])
def test_tensors_of_another_size_are_misses(server: CacheServer, backend: MakeBackend, wrong: int) -> None:
    pool = HostPool()
    storage = backend(server.port, pool)
    (key,) = page_keys(1)
    pool.fill(0)
    assert storage.batch_set_v1([key], pool.indices(0)) == [True]
    other = torch.full((pool.page_bytes + wrong if wrong else 0,), 7, dtype=torch.uint8)
    before = other.clone()
    assert storage.get(key, other) is None
    assert not storage.set(page_keys(2)[0], other)
    assert torch.equal(other, before)
    assert storage.get(key, None) is None


def test_indices_that_are_not_whole_pages_are_misses(
    server: CacheServer, backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    pool = HostPool()
    storage = backend(server.port, pool)
    pool.fill(0, 1)
    keys = page_keys(1, 2)
    for indices in (pool.indices(0), pool.indices(0, 1)[:-1], pool.indices(0, 1) + 1, pool.indices(0, 99)):
        assert storage.batch_set_v1(keys, indices) == [False] * 2
        assert storage.batch_get_v1(keys, indices) == [False] * 2
    assert storage.batch_set_v1(keys, None) == [False] * 2
    assert storage.batch_exists(keys) == 0
    assert caplog.text.count("not those of 2 whole pages") == 1


def test_ranks_salts_models_and_layouts_are_apart(server: CacheServer, backend: MakeBackend) -> None:
    pool = HostPool()
    pool.fill(0)
    key = page_keys(1)
    two = {"tp_size": 2}
    owner = backend(server.port, pool, config=two, cache_salt="a")
    assert owner.batch_set_v1(key, pool.indices(0)) == [True]
    same = backend(server.port, HostPool(), config=two, cache_salt="a")
    assert same.batch_exists(key) == 1
    strangers = [
        backend(server.port, HostPool(), config={**two, "tp_rank": 1}, cache_salt="a"),
        backend(server.port, HostPool(), config={**two, "pp_size": 2}, cache_salt="a"),
        backend(server.port, HostPool(), cache_salt="a"),
        backend(server.port, HostPool(), config=two, cache_salt="b"),
        backend(server.port, HostPool(), config={**two, "model_name": "other"}, cache_salt="a"),
        backend(server.port, HostPool(), config=two, cache_salt="a", weights_id="v"),
        backend(server.port, HostPool("layer_first"), config=two, cache_salt="a"),
        backend(server.port, HostPool(layer_num=1, token_bytes=512), config=two, cache_salt="a"),
        backend(server.port, HostPool(page_size=32), config=two, cache_salt="a"),
        backend(server.port, HostPool(dtype=torch.int8), config=two, cache_salt="a"),
    ]
    for stranger in strangers:
        assert stranger.batch_exists(key) == 0
        assert stranger.batch_get_v1(key, stranger.mem_pool_host.indices(3)) == [False]
        assert stranger.mem_pool_host.page(3) == bytes(stranger.mem_pool_host.page_bytes)


@pytest.mark.parametrize("mode", ["shm", "socket"])
def test_each_rank_loads_its_own_bytes(server: CacheServer, backend: MakeBackend, mode: str) -> None:
    keys = page_keys(1, 2)
    ranks = []
    for rank in range(2):
        pool = HostPool()
        storage = backend(server.port, pool, config={"tp_size": 2, "tp_rank": rank}, transfer_mode=mode)
        pool.fill(0, 1, seed=rank)
        ranks.append((storage, pool, [pool.page(0), pool.page(1)]))
        assert storage.batch_set_v1(keys, pool.indices(0, 1)) == [True] * 2
    for storage, pool, expected in ranks:
        assert storage.batch_get_v1(keys, pool.indices(4, 5)) == [True] * 2
        assert [pool.page(4), pool.page(5)] == expected


def test_ranks_of_an_mla_model_share_pages(server: CacheServer, backend: MakeBackend) -> None:
    pool = HostPool()
    pool.fill(0)
    mla = {"tp_size": 2, "is_mla_model": True}
    assert backend(server.port, pool, config=mla).batch_set_v1(page_keys(1), pool.indices(0)) == [True]
    assert backend(server.port, HostPool(), config={**mla, "tp_rank": 1}).batch_exists(page_keys(1)) == 1


# ---- several pools ---------------------------------------------------------------------------------------------------
def with_pools(storage: Any) -> dict[PoolName, HostPool]:
    pools = {PoolName.MAMBA: HostPool(pages=8, page_size=1, token_bytes=4096), PoolName.INDEXER: HostPool()}
    for name, pool in pools.items():
        storage.register_mem_host_pool_v2(pool, name)
    storage.register_mem_host_pool_v2(storage.mem_pool_host, PoolName.KV)
    return pools


def test_several_pools_of_the_same_keys(server: CacheServer, backend: MakeBackend) -> None:
    kv = HostPool()
    storage = backend(server.port, kv)
    pools = with_pools(storage)
    mamba, indexer = pools[PoolName.MAMBA], pools[PoolName.INDEXER]
    keys = page_keys(1, 2, 3, 4)
    kv.fill(0, 1, 2, 3, seed=1)
    indexer.fill(0, 1, 2, 3, seed=2)
    mamba.fill(0, 1, seed=3)
    pages = {"kv": kv.page(2), "indexer": indexer.page(2), "mamba": mamba.page(1)}
    assert storage.batch_set_v1(keys, kv.indices(0, 1, 2, 3)) == [True] * 4
    done = storage.batch_set_v2(
        [
            PoolTransfer(PoolName.INDEXER, indexer.indices(0, 1, 2), keys[:3]),
            PoolTransfer(PoolName.MAMBA, mamba.indices(0, 1), [keys[1], keys[2]]),
            PoolTransfer(PoolName.MAMBA, mamba.indices(0), keys[:2]),
        ][:2]
    )
    assert done == {PoolName.INDEXER: [True] * 3, PoolName.MAMBA: [True] * 2}

    everywhere = [
        PoolTransfer(PoolName.INDEXER, keys=keys),
        PoolTransfer(PoolName.MAMBA, keys=[""], hit_policy=PoolHitPolicy.TRAILING_PAGES),
    ]
    found = storage.batch_exists_v2([*keys, *page_keys(9)], everywhere)
    assert found.kv_hit_pages == 3
    assert found.extra_pool_hit_pages == {"kv": 4, "indexer": 3, "mamba": 3}
    assert found.restorable_prefix_pages == [2, 3]
    two = [PoolTransfer(PoolName.MAMBA, keys=["", ""], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    assert storage.batch_exists_v2(keys, two).restorable_prefix_pages == [3]
    groups = [PoolTransfer(PoolName.MAMBA, keys=[""], hit_policy=PoolHitPolicy.BLOCK_GROUPS)]
    assert storage.batch_exists_v2(keys, groups).kv_hit_pages == 0
    assert storage.batch_exists_v2(keys).kv_hit_pages == 4

    loaded = storage.batch_get_v2(
        [
            PoolTransfer(PoolName.KV, kv.indices(9), [keys[2]]),
            PoolTransfer(PoolName.INDEXER, indexer.indices(8, 9), keys[2:]),
            PoolTransfer(PoolName.MAMBA, mamba.indices(5), [keys[2]]),
        ]
    )
    assert loaded == {PoolName.KV: [True], PoolName.INDEXER: [True, False], PoolName.MAMBA: [True]}
    assert {"kv": kv.page(9), "indexer": indexer.page(8), "mamba": mamba.page(5)} == pages
    wrong = [PoolTransfer(PoolName.MAMBA, mamba.indices(0), keys[:2]), PoolTransfer(PoolName.INDEXER, None, keys[:1])]
    assert storage.batch_get_v2(wrong) == {PoolName.MAMBA: [False] * 2, PoolName.INDEXER: [False]}


# ---- what becomes of the server --------------------------------------------------------------------------------------
def test_a_server_that_was_away_at_the_start(
    tmp_path: Path, backend: MakeBackend, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache.integration.sglang import page_pool

    monkeypatch.setattr(page_pool, "START_SECONDS", 0.05)
    with CacheServer(tmp_path, l1_size_gb=0.0625) as server:  # chooses the port
        server.wait_ready()
        server.stop()
        pool = HostPool()
        storage = backend(server.port, pool)
        assert "starts without the LMCache server" in caplog.text
        pool.fill(0)
        assert storage.batch_exists(page_keys(1)) == 0
        assert storage.batch_set_v1(page_keys(1), pool.indices(0)) == [False]
        assert storage.batch_get_v1(page_keys(1), pool.indices(1)) == [False]
        with CacheServer(tmp_path, port=server.port, l1_size_gb=0.0625) as later:
            later.wait_ready()
            until(lambda: storage.batch_set_v1(page_keys(1), pool.indices(0)) == [True])
            assert storage.batch_get_v1(page_keys(1), pool.indices(1)) == [True]
            assert pool.page(1) == pool.page(0)


@pytest.mark.parametrize("mode", ["shm", "socket"])
@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_a_restart_of_the_server(tmp_path: Path, backend: MakeBackend, ending: str, mode: str) -> None:
    folder = tmp_path / "l2"
    with CacheServer(tmp_path, l1_size_gb=0.0625, l2_folder=folder) as server:
        server.wait_ready()
        pool = HostPool()
        storage = backend(server.port, pool, transfer_mode=mode, heartbeat_interval=0.2)
        keys = page_keys(*range(8))
        pool.fill(*range(8))
        expected = [pool.page(number) for number in range(8)]
        assert storage.batch_set_v1(keys, pool.indices(*range(8))) == [True] * 8
        until(lambda: len(list(folder.rglob("*.data"))) == 8)
        server.kill() if ending == "kill" else server.stop()
        began = time.monotonic()
        assert storage.batch_exists(keys) == 0
        assert storage.batch_get_v1(keys, pool.indices(*range(8, 16))) == [False] * 8
        assert storage.batch_set_v1(page_keys(20), pool.indices(0)) == [False]
        assert time.monotonic() - began < 2 * STALL_SECONDS  # nobody waits until the server is back
        with CacheServer(tmp_path, port=server.port, l1_size_gb=0.0625, l2_folder=folder) as later:
            later.wait_ready()
            until(lambda: storage.batch_exists(keys) == 8)  # from L2
            pool.wipe()
            assert storage.batch_get_v1(keys, pool.indices(*range(8, 16))) == [True] * 8
            assert [pool.page(number) for number in range(8, 16)] == expected


def test_a_server_that_stands_still_is_a_miss_in_time(
    server: CacheServer, backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache.integration.sglang import page_pool

    for name, seconds in (("PROBE_SECONDS", 0.3), ("LOAD_SECONDS", 0.3), ("_GRACE_SECONDS", 0.2)):
        monkeypatch.setattr(page_pool, name, seconds)
    pool = HostPool()
    storage = backend(server.port, pool)
    pool.fill(0)
    expected = pool.page(0)
    assert storage.batch_set_v1(page_keys(1), pool.indices(0)) == [True]
    server.pause()
    try:
        began = time.monotonic()
        assert storage.batch_get_v1(page_keys(1), pool.indices(1)) == [False]
        assert storage.batch_exists(page_keys(1)) == 0
        assert storage.batch_set_v1(page_keys(2), pool.indices(0)) == [False]
        assert time.monotonic() - began < 5.0 + STALL_SECONDS
    finally:
        server.resume()
    until(lambda: storage.batch_get_v1(page_keys(1), pool.indices(1)) == [True])
    assert pool.page(1) == expected


def test_evicted_pages_are_misses_and_the_others_exact(server: CacheServer, backend: MakeBackend) -> None:
    pool = HostPool(token_bytes=8192)  # 2 MiB a page, where L1 has 64 MiB
    storage = backend(server.port, pool)
    numbers = range(48)
    kept = {}
    for number in numbers:
        pool.fill(0, seed=number)
        kept[number] = pool.page(0)
        assert storage.batch_set_v1(page_keys(number), pool.indices(0)) == [True]
    hits = []
    for number in reversed(numbers):  # L1 may still evict: of what is left, what nobody has read yet
        if storage.batch_get_v1(page_keys(number), pool.indices(1)) == [True]:
            hits.append(number)
            assert pool.page(1) == kept[number]
    assert 10 < len(hits) < 32
    assert hits[0] == numbers[-1]


def test_more_pages_than_l1_holds(tmp_path: Path, backend: MakeBackend) -> None:
    """Nothing is evicted: else that begins, at any moment, once L1 is nearly full."""
    with CacheServer(tmp_path, l1_size_gb=0.0625, extra=["--eviction-policy", "noop"]) as server:
        server.wait_ready()
        pool = HostPool(pages=48, token_bytes=8192)
        storage = backend(server.port, pool)
        pool.fill(*range(48))
        expected = [pool.page(number) for number in range(48)]
        stored = storage.batch_set_v1(page_keys(*range(48)), pool.indices(*range(48)))
        count = stored.index(False)
        assert 10 < count < 32 and not any(stored[count:])
        assert storage.batch_exists(page_keys(*range(48))) == count
        pool.wipe()
        assert storage.batch_get_v1(page_keys(*range(48)), pool.indices(*range(48))) == stored
        assert [pool.page(number) for number in range(count)] == expected[:count]


def test_a_damaged_page_is_a_miss_and_is_removed(
    server: CacheServer, backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    pool = HostPool()
    storage = backend(server.port, pool)
    keys = page_keys(1, 2, 3)
    pool.fill(0, 1, 2)
    second = pool.page(1)
    assert storage.batch_set_v1(keys, pool.indices(0, 1, 2)) == [True] * 3
    memory = Path("/dev/shm") / server.shm_name
    with memory.open("r+b") as l1:
        at = l1.read().index(second)
        l1.seek(at + 100)
        l1.write(b"\xff" if second[100] != 255 else b"\x00")
    assert storage.batch_get_v1(keys, pool.indices(4, 5, 6)) == [True, False, True]
    assert "is not what was stored" in caplog.text
    until(lambda: storage.batch_exists(keys) == 1)
    assert storage.batch_set_v1(keys, pool.indices(0, 1, 2)) == [True] * 3
    assert storage.batch_get_v1(keys, pool.indices(4, 5, 6)) == [True] * 3
    assert pool.page(5) == second


def test_clear_empties_the_server(server: CacheServer, backend: MakeBackend) -> None:
    pool = HostPool()
    storage = backend(server.port, pool)
    assert storage.batch_set_v1(page_keys(1, 2), pool.indices(0, 1)) == [True] * 2
    storage.clear()
    assert storage.batch_exists(page_keys(1, 2)) == 0


# ---- figures, refusals -----------------------------------------------------------------------------------------------
def test_what_the_figures_say(server: CacheServer, backend: MakeBackend) -> None:
    pool = HostPool()
    storage = backend(server.port, pool, config={"enable_storage_metrics": True})
    assert storage.batch_set_v1(page_keys(1, 2), pool.indices(0, 1)) == [True] * 2
    assert storage.batch_exists(page_keys(1, 2, 3)) == 2
    assert storage.batch_get_v1(page_keys(1, 2), pool.indices(0, 1)) == [True] * 2
    figures = storage.get_stats()
    assert (figures.prefetch_pgs, figures.backup_pgs) == ([2], [2])
    assert figures.prefetch_bandwidth[0] > 0 and figures.backup_bandwidth[0] > 0
    assert storage.get_stats().prefetch_pgs == []
    for name, value in (("lookups", 1), ("lookup_requested_tokens", 192), ("lookup_hit_l1_tokens", 128)):
        assert server.metric(f"lmcache_mp_{name}_total") == value
    assert server.metric("lmcache_mp_lookup_hit_tokens_total") == 128
    assert backend(server.port, HostPool()).get_stats() is None


def test_wrong_settings_are_refused_by_name(
    backend: MakeBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for wrong, said in (
        ({"lmcache.mp.cache_salt": 5}, "lmcache.mp.cache_salt is 5"),
        ({"lmcache.mp.heartbeat_interval": 0}, "heartbeat_interval is 0"),
        ({"interface_v1": 0}, '"interface_v1": 1'),
    ):
        from lmcache.integration.sglang.hicache import LMCacheHiCacheStorage

        with pytest.raises(ConfigError, match=said):
            LMCacheHiCacheStorage(StorageConfig({**extra_config(1), **wrong}), {})
    with caplog.at_level(logging.WARNING):
        backend(1, cache_sald="x")
    assert "did you mean lmcache.mp.cache_salt?" in caplog.text


def test_a_fault_of_ours_is_a_miss(
    server: CacheServer, backend: MakeBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lmcache.integration.sglang.page_pool import PagePool

    pool = HostPool()
    storage = backend(server.port, pool)

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("a fault of ours")

    for name in ("probe", "load", "store"):
        monkeypatch.setattr(PagePool, name, fail)
    keys, indices = page_keys(1, 2), pool.indices(0, 1)
    transfer = PoolTransfer(PoolName.KV, indices, keys)
    assert storage.batch_exists(keys, extra_info=None) == 0
    assert storage.batch_get_v1(keys, indices) == [False] * 2
    assert storage.batch_set_v1(keys, host_indices=indices) == [False] * 2
    assert storage.batch_exists_v2(keys, [transfer]).kv_hit_pages == 0
    assert storage.batch_get_v2([transfer]) == {PoolName.KV: [False] * 2}
    assert storage.batch_set_v2([transfer], extra_info=None) == {PoolName.KV: [False] * 2}
    value = torch.zeros(pool.page_bytes, dtype=torch.uint8)
    assert (storage.exists(keys[0]), storage.get(keys[0], value), storage.set(keys[0], value)) == (False, None, False)
    assert caplog.text.count("LMCache failed in") == 9


def test_pools_that_cannot_be_kept_exactly_are_left_alone(
    server: CacheServer, backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    moving = HostPool()
    moving.shared_allocation_domain = object()  # type: ignore[attr-defined]
    mute = HostPool()
    mute.get_page_buffer_meta = None
    for pool in (moving, mute):
        storage = backend(server.port, pool)
        assert storage.batch_exists(page_keys(1)) == 0
        assert storage.batch_set_v1(page_keys(1), pool.indices(0)) == [False]
        assert storage.get(page_keys(1)[0], torch.zeros(pool.page_bytes, dtype=torch.uint8)) is None
    unknown = backend(server.port, weights_id="")
    unknown.register_mem_pool_host(HostPool())
    assert unknown.batch_exists(page_keys(1)) == 0
    for said in ("move while they are in use", "lmcache.mp.weights_id"):
        assert said in caplog.text
