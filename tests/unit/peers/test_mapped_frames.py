"""Copies out of the memory of a peer on the same host: they end when they say so, and keep nothing of another
peer waiting."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import random
from pathlib import Path

import pytest

from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome
from lmcache.errors import AdapterError
from lmcache.peers.transports.contract import Transfer
from lmcache.peers.transports.shared_memory import MappedFrames, SharedMemoryTransport
from lmcache.testing.frames import FrameMemory, keys
from unit.l2.support import run
from unit.peers.support import holding, reading

OBJECTS = 64
KEYS = keys(OBJECTS)


class PeerMemory:
    """What a peer has, mapped as a file of it."""

    def __init__(self, file: Path, wanted: list[ObjectKey], payload_bytes: int = 16 << 10) -> None:
        self.keys, self.payload_bytes = wanted, payload_bytes
        source = FrameMemory(len(wanted), payload_bytes)
        file.write_bytes(b"".join(source.fill(slot, key) for slot, key in enumerate(wanted)))
        with file.open("rb") as opened:
            self.mapping = mmap.mmap(opened.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)

    def transfer(self, memory: FrameMemory) -> Transfer:
        size = memory.slot_bytes
        count = len(self.keys)
        slots = [slot * size for slot in range(count)]
        return Transfer(self.keys, memory.buffers, [size] * count, slots, 1, count * size, 30.0)

    def memory(self) -> FrameMemory:
        return FrameMemory(len(self.keys), self.payload_bytes)


def test_a_cancelled_load_touches_nothing_when_it_has_ended(tmp_path: Path) -> None:
    async def test() -> None:
        peer, choose = PeerMemory(tmp_path / "l1", KEYS), random.Random(1)
        frames = MappedFrames()
        transport = SharedMemoryTransport(peer.mapping, frames)
        for _ in range(100):
            memory = peer.memory()
            loads = [asyncio.ensure_future(transport.fetch(peer.transfer(memory))) for _ in range(3)]
            for _ in range(choose.randrange(1, 5)):
                await asyncio.sleep(0)
            for load in loads:
                load.cancel()
            for load in loads:
                with contextlib.suppress(asyncio.CancelledError):
                    await load
            for buffer in memory.buffers:
                buffer[:8] = bytes(8)
            await asyncio.sleep(0.0005)
            assert all(bytes(buffer[:8]) == bytes(8) for buffer in memory.buffers)
        memory = peer.memory()  # no place among those that are copied was kept
        assert (await transport.fetch(peer.transfer(memory))).outcomes == [LoadOutcome.LOADED] * OBJECTS
        await frames.close()

    run(test)


def test_what_is_copied_ends_when_the_peer_and_the_adapter_are_left(tmp_path: Path) -> None:
    async def test() -> None:
        peer = PeerMemory(tmp_path / "l1", KEYS)
        frames = MappedFrames()
        transport = SharedMemoryTransport(peer.mapping, frames)
        memories = [peer.memory() for _ in range(5)]
        loads = [asyncio.ensure_future(transport.fetch(peer.transfer(memory))) for memory in memories]
        await asyncio.sleep(0)
        transport.close()
        await frames.close()
        ended = await asyncio.gather(*loads)
        for fetched, memory in zip(ended, memories, strict=True):
            assert fetched.outcomes == [LoadOutcome.LOADED] * OBJECTS
            assert all(memory.holds(slot, key) for slot, key in enumerate(KEYS))
        assert (await transport.fetch(peer.transfer(peer.memory()))).outcomes == [LoadOutcome.FAILED] * OBJECTS
        late = await SharedMemoryTransport(peer.mapping, frames).fetch(peer.transfer(peer.memory()))
        assert late.outcomes == [LoadOutcome.FAILED] * OBJECTS and isinstance(late.fault, AdapterError)

    run(test)


def test_loads_of_one_peer_keep_none_of_another_waiting(tmp_path: Path) -> None:
    async def test() -> None:
        busy = PeerMemory(tmp_path / "busy", keys(4), payload_bytes=1 << 20)
        other = PeerMemory(tmp_path / "other", keys(1))
        frames = MappedFrames()
        transport = SharedMemoryTransport(busy.mapping, frames)
        loads = [asyncio.ensure_future(transport.fetch(busy.transfer(busy.memory()))) for _ in range(32)]
        await asyncio.sleep(0)
        fetched = await SharedMemoryTransport(other.mapping, frames).fetch(other.transfer(other.memory()))
        assert fetched.outcomes == [LoadOutcome.LOADED]
        assert sum(load.done() for load in loads) < len(loads) // 2
        await asyncio.gather(*loads)
        await frames.close()

    run(test)


def test_without_threads_to_copy_frames_come_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> MappedFrames:
        raise BlockingIOError("Resource temporarily unavailable")

    async def test() -> None:
        monkeypatch.setattr("lmcache.peers.adapter.MappedFrames", refuse)
        with holding(KEYS[:8]) as (holder,):
            async with reading([holder.address], maps_memory=True) as reader:
                await reader.gets(KEYS[:8])
                assert reader.sample("p2p_received_bytes_total", transport="tcp") >= 8 * 16384

    run(test)
