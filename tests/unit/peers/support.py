"""Servers as their peers see them: honest ones over a real L1, and one that does what a test says, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

from lmcache import _native
from lmcache.clock import Clock, SystemClock
from lmcache.core.chunking import ChunkHasher
from lmcache.core.frame import header_template
from lmcache.core.key import ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.core.outcome import LoadOutcome
from lmcache.l1.store import L1Options, L1Store
from lmcache.l2.adapter_types import ConfiguredAdapter
from lmcache.l2.runner import Runner
from lmcache.peers.adapter import PeersAdapter
from lmcache.peers.config import PeersConfig
from lmcache.peers.connections import connect
from lmcache.peers.handshake import Introducer
from lmcache.peers.identity import Identity
from lmcache.peers.listener import PeerListener
from lmcache.peers.sockets import PeerSocket
from lmcache.peers.transports.library import LibrarySettings
from lmcache.peers.transports.library_process import LibraryProcess
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.frames import PAYLOAD_BYTES, FrameMemory, batch_of
from lmcache.transport.listening import listen
from polling import until

FRAME_BYTES = FRAME_HEADER_BYTES + PAYLOAD_BYTES
ENGINE = 7
FOREVER = 1e18
_READER_SLOTS = 64


def identity(
    address: str,
    *,
    chunk_tokens: int = 256,
    algorithm: str = "blake3",
    memory: L1Store | None = None,
    transfer_engine: str = "",
) -> Identity:
    sample = ChunkHasher("blake3", chunk_tokens).sample()
    epoch = memory.memory.server_epoch if memory is not None else os.urandom(16)
    path, size = (memory.memory.path, memory.memory.size_bytes) if memory is not None else ("", 0)
    return Identity(
        epoch,
        address,
        chunk_tokens,
        algorithm,
        sample,
        shm_path=path,
        shm_bytes=size,
        transfer_engine=transfer_engine,
    )


class ToldLibrary(LibraryProcess):
    """Tells others what a test says of its memory."""

    tells: Callable[[bytes], bytes] = staticmethod(lambda region: region)

    @property
    def region(self) -> bytes:
        return self.tells(super().region)


def library_of(transfer_engine: str, l1: L1Store, host: str, *, serves: bool) -> ToldLibrary | None:
    if not transfer_engine:
        return None
    memory = l1.memory
    settings = LibrarySettings(transfer_engine, memory.path, memory.size_bytes, memory.server_epoch, host, serves)
    return ToldLibrary(settings, this_host_alone=True)


def l1_of(slots: int) -> L1Store:
    size_bytes = slots * FRAME_BYTES
    name = f"lmcache-test-peer-{os.getpid()}-{time.monotonic_ns()}"
    return L1Store.open(name, os.urandom(16), L1Options(size_bytes, policy="LRU", init_bytes=size_bytes))


class Holder:
    """A server with an L1 that others load from."""

    def __init__(
        self,
        *,
        slots: int = 64,
        token_file: str = "",
        chunk_tokens: int = 256,
        clock: Clock | None = None,
        port: int = 0,
        transfer_engine: str = "",
        library_host: str = "127.0.0.1",
    ) -> None:
        self.l1 = l1_of(slots)
        self.metrics = Metrics()
        self._contents = FrameMemory(1)
        listening = listen("127.0.0.1", port, "a test")
        self.address = f"127.0.0.1:{listening.getsockname()[1]}"
        known_as = identity(self.address, chunk_tokens=chunk_tokens, memory=self.l1, transfer_engine=transfer_engine)
        self.library = library_of(transfer_engine, self.l1, library_host, serves=True)
        self.listener = PeerListener(
            listening,
            Introducer(known_as, token_file, os.urandom),
            self.l1,
            self.metrics.p2p,
            clock or SystemClock(),
            self.library,
        )
        self.listener.start()

    def reserve(self, keys: Sequence[ObjectKey]) -> tuple[int, array[int]]:
        reserved = self.l1.reserve(ENGINE, batch_of(keys, FRAME_BYTES), FOREVER)
        return reserved.reservation, array("Q", reserved.slots)

    def fill(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> None:
        template = header_template(keys[0].namespace, PAYLOAD_BYTES)
        for key, slot in zip(keys, slots, strict=True):
            self.l1.memory.view(slot + FRAME_HEADER_BYTES, PAYLOAD_BYTES)[:] = self._contents.payload_of(key)
            _native.frame_seal(self.l1.address_of(slot), template, key.chunk_hash)

    def put(self, keys: Sequence[ObjectKey]) -> None:
        reservation, slots = self.reserve(keys)
        self.fill(keys, slots)
        assert self.l1.core.commit(reservation).objects == len(keys)

    def slot_of(self, key: ObjectKey) -> int:
        acquired = self.l1.core.acquire_each(ENGINE, key.namespace.digest, key.chunk_hash, FOREVER)
        self.l1.core.release(acquired.lease)
        return array("Q", acquired.slots)[0]

    @property
    def leases(self) -> int:
        return self.l1.core.stats()["leases"]

    def sample(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(f"lmcache_mp_{name}") or 0.0

    def close(self) -> None:
        assert self.listener.stop()
        self.l1.check_idle()
        self.l1.close()


@contextlib.contextmanager
def holding(*contents: Sequence[ObjectKey], **options: object) -> Iterator[list[Holder]]:
    """A server for each of these, with those objects. At the end nothing of it is held."""
    with contextlib.ExitStack() as stack:
        holders = []
        for keys in contents:
            holder = Holder(**options)  # type: ignore[arg-type]
            stack.callback(holder.close)
            if keys:
                holder.put(keys)
            holders.append(holder)
        yield holders


class Reader:
    """A server that loads from others, as its storage loop sees them."""

    def __init__(
        self,
        members: Sequence[str],
        *,
        clock: Clock | None = None,
        token_file: str = "",
        chunk_tokens: int = 256,
        maps_memory: bool = False,
        lookup_seconds: float = 30.0,
        load_seconds: float = 30.0,
        transfer_engine: str = "",
        library_host: str = "127.0.0.1",
        heartbeat_seconds: float = 0.0,
    ) -> None:
        self.metrics = Metrics()
        config = PeersConfig(
            index=0,
            type="p2p",
            members=tuple(members),
            timeout_seconds=load_seconds,
            lookup_timeout_seconds=lookup_seconds,
            heartbeat_seconds=heartbeat_seconds,
            maps_memory=maps_memory,
            transfer_engine=transfer_engine,
        )
        self.is_inside = True  # buffers are in L1, where there is one
        self.l1 = l1_of(_READER_SLOTS) if transfer_engine else None
        self.library = library_of(transfer_engine, self.l1, library_host, serves=False) if self.l1 is not None else None
        introducer = Introducer(identity("127.0.0.1:1", chunk_tokens=chunk_tokens), token_file, os.urandom)
        memory = self.l1.memory if self.l1 is not None else None
        self.adapter = PeersAdapter(config, introducer, self.metrics.p2p, clock or SystemClock(), self.library, memory)
        self.runner = Runner(ConfiguredAdapter(config, self.adapter), self.metrics.l2, clock or SystemClock())

    async def has(self, keys: Sequence[ObjectKey]) -> int:
        """How many of them some peer says it has."""
        return (await self.runner.ask(keys)).exist.count(True)

    async def finds(self, keys: Sequence[ObjectKey], count: int | None = None) -> None:
        """Asks until that many are found, all by default: an answer may come too late on a busy machine."""
        wanted = len(keys) if count is None else count
        await later(lambda: self.has(keys), lambda found: found == wanted)

    def memory_for(self, slots: int) -> FrameMemory:
        if self.l1 is None or not self.is_inside:
            return FrameMemory(slots)
        return FrameMemory(slots, within=self.l1.memory.view(4096, slots * FRAME_BYTES))

    async def load(self, keys: Sequence[ObjectKey]) -> int:
        """How many came. Each byte of those is right."""
        memory = self.memory_for(len(keys))
        outcomes = await self.runner.load(keys, memory.buffers, lambda: None)
        loaded = [index for index, outcome in enumerate(outcomes) if outcome is LoadOutcome.LOADED]
        assert all(memory.holds(index, keys[index]) for index in loaded)
        assert set(outcomes) <= {LoadOutcome.LOADED, LoadOutcome.MISSING}
        return len(loaded)

    async def hears_all(self, keys: Sequence[ObjectKey]) -> None:
        """Asks until every peer has answered in time, and all are found."""

        async def ask() -> int:
            late, asked = self.sample("p2p_late_lookups_total"), self.sample("p2p_lookups_total")
            found = await self.has(keys)
            all_asked = self.sample("p2p_lookups_total") - asked == len(self.adapter.status()["peers"])
            return found if all_asked and late == self.sample("p2p_late_lookups_total") else -1

        await later(ask, lambda found: found == len(keys))

    async def gets(self, keys: Sequence[ObjectKey]) -> None:
        """Asks and loads until all of them come: on a busy machine an honest peer may be late, too."""

        async def get() -> int:
            await self.has(keys)
            return await self.load(keys)

        await later(get, lambda loaded: loaded == len(keys))

    def peer(self, address: str) -> dict[str, object]:
        (found,) = [peer for peer in self.adapter.status()["peers"] if peer["address"] == address]
        return dict(found)

    async def connected(self, *addresses: str) -> None:
        for address in addresses:
            await until_true(lambda address=address: bool(self.peer(address)["connected"]))

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"lmcache_mp_{name}", labels) or 0.0


@contextlib.asynccontextmanager
async def reading(members: Sequence[str], *, connects: bool = True, **options: object) -> AsyncIterator[Reader]:
    """Connected to all members unless the test says otherwise. At the end nothing is under way."""
    reader = Reader(members, **options)  # type: ignore[arg-type]
    await reader.runner.open()
    await reader.adapter.ready()
    try:
        if connects:
            await reader.connected(*members)
        yield reader
        await until_true(lambda: not fault_of(reader.adapter.check_idle))
        reader.runner.check_idle()
    finally:
        assert await reader.runner.drain(20)
        assert await reader.runner.close(20)
        if reader.l1 is not None:
            reader.l1.close()


async def known_to(holder: Holder) -> PeerSocket:
    """A connection to it after the handshake."""
    host, _, port = holder.address.rpartition(":")
    introducer = Introducer(identity("127.0.0.1:1"), "", os.urandom)
    return (await connect(host, int(port), introducer))[0]


def fault_of(check: Callable[[], None]) -> str:
    try:
        check()
    except AssertionError as fault:
        return str(fault)
    return ""


async def until_true(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds:g} s"
        await asyncio.sleep(0.005)


async def later(ask: Callable[[], Awaitable[int]], is_right: Callable[[int], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_right(found := await ask()):
        assert time.monotonic() < deadline, f"still {found} after {seconds:g} s"
        await asyncio.sleep(0.01)


Script = Callable[["Liar", PeerSocket], Awaitable[None]]


class Liar:
    """Listens as a peer, and does with each connection what the script says. `accept` is the true handshake."""

    def __init__(self, script: Script, honest: Holder) -> None:
        self.honest = honest
        self._script = script
        self._listening = listen("127.0.0.1", 0, "a test")
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.introducer = Introducer(identity(self.address), "", os.urandom)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Liar:
        self._accepting = asyncio.get_running_loop().create_task(self._accept())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in {self._accepting, *self._tasks}:
            task.cancel()
        await asyncio.gather(self._accepting, *self._tasks, return_exceptions=True)
        self._listening.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            accepted, _ = await loop.sock_accept(self._listening)
            task = loop.create_task(self._talk(PeerSocket(accepted)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _talk(self, sock: PeerSocket) -> None:
        try:
            with contextlib.suppress(OSError, EOFError):
                await self._script(self, sock)
        finally:
            sock.close()


__all__ = ["Holder", "Liar", "Reader", "fault_of", "holding", "known_to", "later", "reading", "until", "until_true"]
