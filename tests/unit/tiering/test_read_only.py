"""An adapter over what belongs to others is asked and loaded from, and nothing else happens to it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lmcache.core.hint import Hint
from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, MissReason, StoreOutcome
from lmcache.l2.adapter import Adapter
from lmcache.l2.adapter_types import ConfiguredAdapter, build, parse_adapter
from lmcache.tiering.prefetch import PrefetchRequest, PrefetchResult
from polling import until
from unit.tiering.support import ENGINE, FOREVER, MOCK, Rig, batch, faulty, keys, open_rig


class Others(Adapter):
    """Has what the test puts there, and fails the test when anything else is asked of it."""

    is_read_only = True

    def __init__(self) -> None:
        self.frames: dict[ObjectKey, bytes] = {}
        self.hints: list[Hint | None] = []

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        for key, buffer in zip(keys, buffers, strict=True):
            buffer[:] = self.frames.get(key, bytes(buffer.nbytes))
        return [LoadOutcome.LOADED if key in self.frames else LoadOutcome.MISSING for key in keys]

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        return await self.probe_hinted(keys, None)

    async def probe_hinted(self, keys: Sequence[ObjectKey], hint: Hint | None) -> list[int | None]:
        self.hints.append(hint)
        return [len(self.frames[key]) if key in self.frames else None for key in keys]

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        raise AssertionError("stored")

    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        raise AssertionError("deleted")

    async def clear(self) -> tuple[int, int]:
        raise AssertionError("cleared")

    async def close(self) -> None:
        pass

    def take_from(self, rig: Rig, wanted: Sequence[ObjectKey]) -> None:
        """Frames that a rig has in L1, where they then are no more."""
        slots = rig.l1.core.acquire_each(
            ENGINE,
            b"".join(key.namespace.digest for key in wanted),
            b"".join(key.chunk_hash for key in wanted),
            FOREVER,
        )
        for key, slot in zip(wanted, memoryview(slots.slots).cast("Q"), strict=True):
            self.frames[key] = bytes(rig.l1.memory.view(slot, 8192))
        rig.l1.core.release(slots.lease)
        rig.l1.core.clear()


def others(index: int) -> tuple[ConfiguredAdapter, Others]:
    adapter = Others()
    return ConfiguredAdapter(build(parse_adapter(MOCK, index)).config, adapter), adapter


@pytest.mark.parametrize("store_policy", ["default", "skip_l1"])
def test_it_is_loaded_from_and_never_stored_to(store_policy: str) -> None:
    own, _ = faulty()
    configured, adapter = others(1)
    wanted = keys(12)
    with open_rig([own, configured], store_policy=store_policy) as rig:
        rig.put(wanted, tell=False)
        adapter.take_from(rig, wanted)
        result = rig.fetch(wanted)
        assert result.chunks == 12 and rig.holds(result, wanted)
        rig.l1.core.drop_owner(ENGINE)
        mine = keys(12, seed=1)
        rig.put(mine)
        assert rig.storage.flush(20)
        until(lambda: rig.storage.runners[0].status()["objects"] == 12)
        assert rig.storage.unwritten() == {}
        assert rig.storage.runners[1].status()["objects"] == 0
        assert rig.storage.clear("all")[0] >= 12
        assert rig.fetch(wanted).chunks == 12  # which are the others' own


def test_alone_it_makes_no_write_back() -> None:
    configured, _ = others(0)
    with open_rig([configured]) as rig:
        rig.put(keys(8))
        assert rig.storage.status()["store"]["queued_objects"] == 0
        assert rig.storage.clear("l2") == (0, 0)


def test_what_it_had_is_not_believed_later() -> None:
    configured, adapter = others(0)
    wanted = keys(8)
    with open_rig([configured]) as rig:
        rig.put(wanted, tell=False)
        adapter.take_from(rig, wanted)
        assert rig.fetch(wanted).chunks == 8
        rig.l1.core.drop_owner(ENGINE)
        rig.l1.core.clear()
        adapter.frames.clear()
        assert rig.fetch(wanted).miss_reason is MissReason.NOT_STORED


def test_a_hint_puts_it_first_and_reaches_it() -> None:
    own, _ = faulty()
    configured, adapter = others(1)
    wanted, hint = keys(8), Hint("127.0.0.1:9500", b"e" * 16, 0.5)
    with open_rig([own, configured]) as rig:
        rig.put(wanted, tell=False)
        adapter.take_from(rig, wanted)
        answers: list[PrefetchResult] = []
        request = PrefetchRequest(ENGINE, FOREVER, batch(wanted), 0, 20.0, hint)
        rig.storage.prefetch(request, answers.append)
        until(lambda: answers)
        assert answers[0].chunks == 8 and adapter.hints == [hint]
