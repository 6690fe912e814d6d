"""The copier of the product, whose copies happen when the simulation says so: often at once, sometimes very late."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lmcache import _native
from simulation.world import World

NULL_BLOCK = 0
_TOKEN_BYTES = 8  # of KV, in the memory of simulated engines
_NO_SLOT = _native.NO_SLOT.to_bytes(8, "little")


@dataclass
class Copies:
    """What all copiers of a run share: when copies happen, and what is asked around each."""

    world: World
    snapshot: Callable[[int, list[int]], dict[int, bytes]]
    before_load: Callable[[list[int]], None]
    before_store: Callable[[list[int], dict[int, bytes]], None]
    load_seconds: float | None = None  # of every load; None: as the dice say
    store_seconds: float | None = None  # of every store, likewise
    # Whether a head's block may end so: vLLM's own cache gives it blocks that end as another prompt went on. None:
    # there is no such cache.
    may_end_so: Callable[[int, bytes], bool] | None = None
    # By namespace and chunk hash: the same name, the same bytes.
    stored: dict[tuple[bytes, bytes], list[bytes]] = field(default_factory=dict)


class SimCopier:
    """Stands in for _native.PagedCopier. A copy reads and writes all its memory at one late moment."""

    def __init__(self, copies: Copies, address: int, size_bytes: int, threads: int, cuda: None = None) -> None:
        self._copies = copies
        self._real = _native.PagedCopier(address, size_bytes, 1)
        self._next = 1
        self._waiting: dict[int, Callable[[], int]] = {}
        self._results: dict[int, bytes] = {}
        self._memory: dict[int, int] = {}
        self._closed = False

    def add_group(self, segments: Any, blocks_per_chunk: int, num_blocks: int) -> int:
        group = self._real.add_group(segments, blocks_per_chunk, num_blocks)
        self._memory[group] = segments[0][0]
        return group

    def submit_store(self, group: int, slots: bytes, blocks: bytes, hashes: bytes, template: bytes) -> int:
        sources = array("q", blocks).tolist()
        real = [block for block in sources if block != NULL_BLOCK]
        before = self._copies.snapshot(self._memory[group], real)
        per_chunk = len(sources) * 32 // len(hashes)
        for chunk in range(len(hashes) // 32):
            name = template, hashes[32 * chunk : 32 * chunk + 32]
            of_chunk = sources[chunk * per_chunk : (chunk + 1) * per_chunk]
            if NULL_BLOCK in of_chunk:
                assert slots[8 * chunk : 8 * chunk + 8] == _NO_SLOT, "a chunk without its blocks is stored"
                continue
            content = [before[block] for block in of_chunk]
            may_end_so = self._copies.may_end_so
            if group and may_end_so is not None:
                assert all(may_end_so(self._memory[group], block) for block in content), "a head's block ends wrongly"
                content = [block[:-_TOKEN_BYTES] for block in content]
            assert self._copies.stored.setdefault(name, content) == content, "two contents are stored under one name"

        def run() -> int:
            self._copies.before_store(real, self._copies.snapshot(self._memory[group], real))
            assert before == self._copies.snapshot(self._memory[group], real), "a block was reused before it was stored"
            return self._real.submit_store(group, slots, blocks, hashes, template)

        return self._submit(run, self._copies.store_seconds)

    def submit_load(
        self, group: int, slots: bytes, blocks: bytes, hashes: bytes, digest: bytes, fence: None = None
    ) -> int:
        def run() -> int:
            self._copies.before_load([block for block in array("q", blocks) if block >= 0])
            return self._real.submit_load(group, slots, blocks, hashes, digest)

        return self._submit(run, self._copies.load_seconds)

    def _submit(self, run: Callable[[], int], seconds: float | None = None) -> int:
        assert not self._closed
        number = self._next
        self._next += 1
        self._waiting[number] = run
        if seconds is None:
            seconds = self._copies.world.random.choice((0.0, 0.0, 0.001, 0.002, 0.004, 0.02) * 6 + (0.2, 0.2, 5.0))
        self._copies.world.at(seconds, lambda: self._run(number))
        return number

    def _run(self, number: int) -> None:
        run = self._waiting.pop(number, None)
        if run is None:
            return
        job = run()
        while (result := self._real.wait(job, 1.0)) is None:
            pass
        self._results[number] = result

    def wait(self, number: int, seconds: float) -> bytes | None:
        self._copies.world.block(lambda: number in self._results, seconds)
        return self._results.pop(number, None)

    def die(self) -> None:
        """With its process: what has not been copied never is."""
        self._waiting.clear()

    def close(self) -> None:
        self._closed = True
        for number in list(self._waiting):
            self._run(number)
        self._real.close()
