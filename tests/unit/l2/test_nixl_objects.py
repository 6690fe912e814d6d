"""A NIXL pool of objects when its store is wrong, damaged or gone: real ones, by the OBJ and AZURE_BLOB plugins."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError, ResourceError
from lmcache.l2.adapter import Adapter
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.testing.adapter_contract import RecordingInventory
from lmcache.testing.frames import FrameMemory, keys
from services import nixl
from services.azurite import Azurite
from services.seaweedfs import SeaweedFS

LOADED, CORRUPT, MISSING, FAILED = LoadOutcome.LOADED, LoadOutcome.CORRUPT, LoadOutcome.MISSING, LoadOutcome.FAILED
SLOTS = 8
PLANTED = "cGxhbnRlZC1zZWNyZXQ="  # in base64, as keys of Azure are
RECOVERY_SECONDS = 60.0


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    nixl.need()
    with SeaweedFS(tmp_path_factory.mktemp("seaweedfs")) as server:
        server.wait_ready()
        server.make_bucket("cache")
        yield server


def s3_pool(server: SeaweedFS, prefix: str, slots: int = SLOTS, **params: Any) -> dict[str, Any]:
    given = {**nixl.s3_params(server, "cache"), "object_prefix": prefix, **params}
    return {"type": "nixl_store", "backend": "OBJ", "pool_size": slots, "backend_params": given}


def azure_pool(connection_string: str, container: str) -> dict[str, Any]:
    params = {"connection_string": connection_string, "container_name": container}
    return {"type": "nixl_store", "backend": "AZURE_BLOB", "pool_size": SLOTS, "backend_params": params}


def adapter_of(specification: dict[str, Any]) -> Adapter:
    return build(parse_adapter(specification, 0)).adapter


async def opened(specification: dict[str, Any]) -> tuple[Adapter, RecordingInventory]:
    adapter, inventory = adapter_of(specification), RecordingInventory()
    await adapter.open(inventory)
    await inventory.completed.wait()
    return adapter, inventory


async def store(adapter: Adapter, wanted: Sequence[ObjectKey]) -> list[StoreOutcome]:
    memory = FrameMemory(len(wanted))
    return await adapter.store(wanted, [memory.fill(slot, key) for slot, key in enumerate(wanted)])


async def load(adapter: Adapter, wanted: Sequence[ObjectKey]) -> list[LoadOutcome]:
    """As a server does it: what does not verify is corrupt, and the adapter hears of it. LOADED is exact."""
    target = FrameMemory(len(wanted))
    outcomes = await adapter.load(wanted, target.buffers)
    for at, key in enumerate(wanted):
        if outcomes[at] is LOADED and target.verify(at, key):
            outcomes[at] = CORRUPT
            assert await adapter.delete([key], corrupt=True) == [True]
        assert (outcomes[at] is LOADED) == target.holds(at, key)
    return outcomes


def refusal(specification: dict[str, Any]) -> str:
    async def whole() -> None:
        adapter = adapter_of(specification)
        try:
            await adapter.open(RecordingInventory())
        finally:
            await adapter.close()

    with pytest.raises(ResourceError) as caught:
        asyncio.run(whole())
    return str(caught.value)


@pytest.mark.parametrize("wrong", [{"secret_key": PLANTED}, {"bucket": "another"}])
def test_a_wrong_secret_or_bucket_is_one_sentence_at_the_start(
    s3: SeaweedFS, wrong: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    sentence = refusal(s3_pool(s3, "wrong", **wrong))
    assert sentence.startswith("--l2-adapter 1 (nixl_store): cannot ") and "credentials are right" in sentence
    assert "\n" not in sentence and PLANTED not in sentence + "".join(capfd.readouterr())


def test_a_wrong_key_or_container_of_azure_is_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    nixl.need()
    with Azurite(tmp_path / "azurite") as server:
        server.wait_ready()
        server.make_container("cache")
        right = server.connection_string
        key = right.split("AccountKey=")[1].split(";")[0]
        sentences = [refusal(azure_pool(right.replace(key, PLANTED), "cache")), refusal(azure_pool(right, "another"))]
    shown = "".join([*sentences, *capfd.readouterr()])
    assert all("cannot " in sentence and "\n" not in sentence for sentence in sentences)
    assert PLANTED not in shown and key not in shown


def test_damaged_objects_are_misses_and_their_slots_are_used_again(s3: SeaweedFS) -> None:
    async def whole() -> None:
        adapter, _ = await opened(s3_pool(s3, "damaged"))
        wanted = keys(6)
        assert await store(adapter, wanted) == [StoreOutcome.STORED] * 6
        names = [f"/cache/damaged/nixl-pool-v1/slot-{slot:08}" for slot in range(6)]  # the first free one is the lowest
        frames = [s3.call("GET", name).body for name in names]
        assert s3.call("PUT", names[0], body=frames[0][:5000]).status == 200  # truncated
        assert s3.call("PUT", names[1], body=b"").status == 200
        assert s3.call("PUT", names[2], body=frames[3]).status == 200  # another object's
        assert (
            s3.call("PUT", names[3], body=frames[3] + bytes(100_000)).status == 200
        )  # longer: what is behind is nothing
        assert s3.call("DELETE", names[4]).status == 204
        outcomes = await load(adapter, wanted)
        assert outcomes == [CORRUPT, FAILED, CORRUPT, LOADED, MISSING, LOADED]  # there is no range of an empty object
        lost = [key for key, outcome in zip(wanted, outcomes, strict=True) if outcome is not LOADED]
        await adapter.delete(lost, corrupt=True)
        assert await store(adapter, lost) == [StoreOutcome.STORED] * len(lost)
        assert await load(adapter, wanted) == [LOADED] * 6
        await adapter.close()

    asyncio.run(whole())


def test_damaged_blobs_are_misses_and_their_slots_are_used_again(tmp_path: Path) -> None:
    nixl.need()

    async def whole(server: Azurite) -> None:
        adapter, _ = await opened(azure_pool(server.connection_string, "cache"))
        wanted, memory = keys(6), FrameMemory(6)
        frames = [bytes(memory.fill(slot, key)) for slot, key in enumerate(wanted)]
        assert await adapter.store(wanted, memory.buffers) == [StoreOutcome.STORED] * 6
        names = [f"/cache/lmcache/nixl-pool-v1/slot-{slot:08}" for slot in range(6)]
        changed = {0: frames[0][:5000], 1: b"", 2: frames[3], 3: frames[3] + bytes(100_000)}
        assert [server.put_blob(names[slot], body) for slot, body in changed.items()] == [201] * 4
        assert server.call("DELETE", names[4]) == 202
        outcomes = await load(adapter, wanted)
        assert outcomes[0] is not LOADED and outcomes[1] is not LOADED  # a range that the blob does not have
        assert outcomes[2:] == [CORRUPT, LOADED, MISSING, LOADED]
        lost = [key for key, outcome in zip(wanted, outcomes, strict=True) if outcome is not LOADED]
        await adapter.delete(lost, corrupt=True)
        assert await store(adapter, lost) == [StoreOutcome.STORED] * len(lost)
        assert await load(adapter, wanted) == [LOADED] * 6
        await adapter.close()

    with Azurite(tmp_path / "azurite") as server:
        server.wait_ready()
        server.make_container("cache")
        asyncio.run(asyncio.wait_for(whole(server), RECOVERY_SECONDS))


@pytest.mark.parametrize("persists", [True, False])
def test_cleared_objects_and_those_that_are_not_to_persist_leave_no_bytes(s3: SeaweedFS, persists: bool) -> None:
    """NIXL cannot delete objects: they are written over."""
    prefix = f"cleared-{persists}"
    names = [f"/cache/{prefix}/nixl-pool-v1/slot-{slot:08}" for slot in range(SLOTS)]

    async def whole() -> None:
        adapter, _ = await opened({**s3_pool(s3, prefix), "persist_enabled": persists})
        wanted = keys(3)
        assert await store(adapter, wanted) == [StoreOutcome.STORED] * 3
        if persists:
            assert (await adapter.clear())[0] == 3
        else:
            assert await adapter.delete(wanted) == [True] * 3  # as a server does it at its end
        await adapter.close()

    asyncio.run(whole())
    answers = [s3.call("GET", name) for name in names]
    assert [answer.status for answer in answers] == [200] * 3 + [404] * (SLOTS - 3)
    assert [answer.body for answer in answers[:3]] == [bytes(4096)] * 3


def test_two_servers_on_one_pool_lose_hits_and_never_bytes(s3: SeaweedFS) -> None:
    async def whole() -> None:
        first, _ = await opened(s3_pool(s3, "both"))
        second, _ = await opened(s3_pool(s3, "both"))
        mine, theirs = keys(SLOTS), keys(SLOTS, seed=1)
        assert await store(first, mine) == await store(second, theirs) == [StoreOutcome.STORED] * SLOTS
        assert await load(first, mine) == [CORRUPT] * SLOTS
        assert await load(second, theirs) == [LOADED] * SLOTS
        assert await store(first, mine[:2]) == [StoreOutcome.STORED] * 2
        assert sorted(outcome.value for outcome in await load(second, theirs)) == ["corrupt"] * 2 + ["loaded"] * 6
        await first.close()
        await second.close()

    asyncio.run(whole())


def test_a_pool_may_become_larger_and_smaller(s3: SeaweedFS) -> None:
    """Its directory has more pages then, or longer ones than the objects that are there."""

    async def life(slots: int, seed: int) -> list[ObjectKey]:
        """What it found."""
        adapter, inventory = await opened(s3_pool(s3, "sizes", slots))
        assert await load(adapter, inventory.order) == [LOADED] * len(inventory.order)
        await store(adapter, keys(2, seed))
        await adapter.close()
        return sorted(inventory.order)

    async def whole() -> None:
        first, second, third = keys(2), keys(2, seed=1), keys(2, seed=2)
        assert await life(8, 0) == []
        assert await life(40, 1) == sorted(first)
        assert await life(1100, 2) == sorted([*first, *second])
        assert await life(8, 3) == sorted([*first, *second, *third])
        assert await life(1100, 4) == sorted([*first, *second, *third, *keys(2, seed=3)])

    asyncio.run(whole())


@pytest.mark.slow  # the plugin tries for seconds
def test_a_store_that_was_away_goes_on(tmp_path: Path) -> None:
    """Gone in the middle of a load and back: what is loaded meanwhile is exact or fails; afterwards all is there."""
    nixl.need()

    async def whole() -> None:
        server = Azurite(tmp_path / "azurite")
        server.wait_ready()
        server.make_container("cache")
        adapter, _ = await opened(azure_pool(server.connection_string, "cache"))
        wanted = keys(SLOTS - 1)
        try:
            assert await store(adapter, wanted) == [StoreOutcome.STORED] * len(wanted)
            loading = [asyncio.ensure_future(load(adapter, wanted)) for _ in range(2)]
            await asyncio.get_running_loop().run_in_executor(None, server.stop)
            for outcomes in await asyncio.gather(*loading):
                assert set(outcomes) <= {LOADED, FAILED}
            assert await load(adapter, wanted[:1]) == [FAILED]
            assert await store(adapter, keys(1, seed=1)) == [StoreOutcome.FAILED]
            with pytest.raises(AdapterError, match="could not be deleted"):
                await adapter.delete(wanted[:1])
            server = server.restart()
            server.wait_ready()
            assert await load(adapter, wanted) == [LOADED] * len(wanted)
            assert await adapter.delete(wanted[:1]) == [True]
            assert await store(adapter, wanted[:1]) == [StoreOutcome.STORED]
            assert await load(adapter, wanted) == [LOADED] * len(wanted)
        finally:
            await adapter.close()
            server.stop()

    asyncio.run(asyncio.wait_for(whole(), 2 * RECOVERY_SECONDS))
