"""All peers as one adapter of L2: what they hold can be loaded from here, and nothing else. They are asked behind the
adapters of this server, under the same layers.

Faults of a peer are that peer's: its own breaker leaves it alone, and what it did not give comes from another peer or
is not there. So this adapter never fails as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.core.address import host_and_port, host_port, is_loopback
from lmcache.core.hint import Hint
from lmcache.core.key import ObjectKey
from lmcache.core.key_batch import pack_keys
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import ConfigError
from lmcache.l2.adapter import Adapter, Inventory
from lmcache.l2.background import spawn
from lmcache.l2.call_threads import CallThreads
from lmcache.memory.l1_file import L1File
from lmcache.peers.config import PeersConfig
from lmcache.peers.handshake import Introducer
from lmcache.peers.peer import Answer, Peer, PeerContext
from lmcache.peers.placements import Placements, Share
from lmcache.peers.transports.contract import Transfer
from lmcache.peers.transports.library_process import START_SECONDS, LibraryProcess
from lmcache.peers.transports.shared_memory import MappedFrames
from lmcache.telemetry.metrics import P2PMetrics

log = logging.getLogger("lmcache.peers")

_LOAD_SHARE = 0.9  # of the time of a load: what runs into the deadline of the whole call would suspend all peers
_TOO_MANY = (
    f"A server has {limits.MAX_PEERS} peers at most, others are left out: give groups of servers a coordinator, or "
    "--p2p-peers, of their own."
)
_WAIT_MARGIN = 0.1  # of a wait that was asked for, until its answer is there


class PeersAdapter(Adapter):
    verifies = True
    is_read_only = True
    most_calls = limits.MAX_PEER_CALLS
    most_load_objects = limits.MAX_PEER_READ_KEYS  # small ones: a read costs as much as some hundred KiB of frames

    def __init__(
        self,
        config: PeersConfig,
        introducer: Introducer,
        metrics: P2PMetrics,
        clock: Clock,
        library: LibraryProcess | None = None,
        l1: L1File | None = None,
    ) -> None:
        """`library` reads into `l1`, and is started and ended here."""
        self._config = config
        self._library = library
        self._l1 = l1
        self._introducer = introducer
        self._metrics = metrics
        self._clock = clock
        self._peers: dict[str, Peer] = {}
        self._members: Sequence[str] = config.members  # as they were given last
        self._unnamed_since: dict[str, float] = {}  # peers that are no members any more, in the loop's time
        self._unnamed_timer: asyncio.TimerHandle | None = None  # until the first of them is to leave
        self._left_out: set[str] = set()  # sentences that have been said
        self._placements: Placements[Peer] = Placements(clock, Peer.release)
        self._late: set[asyncio.Task[None]] = set()  # lookups that nobody waits for any more
        self._threads: CallThreads | None = None
        self._mapped: MappedFrames | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None
        self._starting: asyncio.Future[None] | None = None  # of the library

    # ---- members -----------------------------------------------------------------------------------------------------
    async def open(self, inventory: Inventory) -> None:
        self._loop = asyncio.get_running_loop()
        self._threads = CallThreads("peer-load", limits.PEER_LOAD_THREADS)
        self._mapped = _mapped_frames() if self._config.maps_memory else None
        self._context = PeerContext(
            self._introducer,
            self._threads,
            self._metrics,
            self._clock,
            self._config.lookup_timeout_seconds,
            self._config.timeout_seconds,
            mapped=self._mapped,
            library=self._library,
            l1_address=self._l1.address if self._l1 is not None else 0,
            l1_bytes=self._l1.size_bytes if self._l1 is not None else 0,
            forget=self._placements.forget_peer,
            lost=self._on_lost,
        )
        if self._library is not None:  # the deadline of loads, which `open` has, is not for imports
            self._starting = asyncio.ensure_future(self._library.start())
        await self._set_members(self._config.members)
        inventory.complete()

    async def ready(self) -> None:
        """After `open`: until the transfer engine can be used. ResourceError where it cannot be."""
        if self._starting is not None:
            await asyncio.shield(self._starting)

    def wait_ready(self) -> None:
        """Waits like `ready`, on any other thread than the loop's."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self.ready(), self._loop).result(2 * START_SECONDS)

    def set_members(self, addresses: Iterable[str]) -> None:
        """The peers from now on, HOST:PORT each, beside those of --p2p-peers. One that is not named any more is left
        when its connection has ended, when its place is needed, or after PEER_UNNAMED_SECONDS or two heartbeats. Any
        thread, after `open`; without effect after `close`."""
        assert self._loop is not None
        members = [*self._config.members, *addresses]
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._begin_members, members)

    def _begin_members(self, addresses: Sequence[str]) -> None:
        self._members = addresses
        spawn(self._set_members(addresses), "peer-members")

    async def _set_members(self, addresses: Iterable[str]) -> None:
        if self._ending is not None:
            return
        wanted, left_out = self._members_of(addresses)
        leaving = [self._peers.pop(name) for name in self._unnamed_to_leave(wanted)]
        for name, (host, port) in wanted.items():
            if name not in self._peers and len(self._peers) < limits.MAX_PEERS:
                self._peers[name] = Peer(host, port, name, self._context)
                self._peers[name].start()
        if not wanted.keys() <= self._peers.keys():
            left_out.add(_TOO_MANY)
        for sentence in sorted(left_out - self._left_out):
            log.warning("%s", sentence)
        self._left_out = left_out
        for peer in leaving:
            self._placements.forget_peer(peer)
        await asyncio.gather(*(peer.close() for peer in leaving))

    def _members_of(self, addresses: Iterable[str]) -> tuple[dict[str, tuple[str, int]], set[str]]:
        """Host and port of each, by its name; and a sentence for each that is left out."""
        wanted: dict[str, tuple[str, int]] = {}
        left_out: set[str] = set()
        for address in addresses:
            try:
                host, port = host_and_port("A peer", address)
            except ConfigError as error:
                left_out.add(f"{error} It is left out.")
                continue
            if self._config.this_host_alone and not is_loopback(host):
                left_out.add(
                    f"The peer {address} is left out: others than those of this host need --p2p-token-file or "
                    "--p2p-without-token."
                )
                continue
            wanted[_name(host, port)] = host, port
        wanted.pop(self._introducer.identity.address.lower(), None)
        return wanted, left_out

    def _unnamed_to_leave(self, wanted: Collection[str]) -> list[str]:
        """Members to leave. A coordinator that was started again names nobody until all have joined it again: those
        that are connected are kept for a while, where named ones do not need their places."""
        assert self._loop is not None
        now_seconds = self._loop.time()
        kept_seconds = max(limits.PEER_UNNAMED_SECONDS, 2 * self._config.heartbeat_seconds)
        unnamed = self._peers.keys() - wanted
        since = {name: self._unnamed_since.get(name, now_seconds) for name in unnamed}
        kept = [
            name for name in sorted(unnamed, key=lambda name: -since[name]) if self._peers[name].identity is not None
        ]
        kept = kept[: max(0, limits.MAX_PEERS - len(wanted))]  # those that were named last
        kept = [name for name in kept if now_seconds - since[name] < kept_seconds]
        self._unnamed_since = {name: since[name] for name in kept}
        self._cancel_unnamed_timer()
        if kept:
            at_seconds = min(self._unnamed_since.values()) + kept_seconds
            self._unnamed_timer = self._loop.call_at(at_seconds, lambda: self._begin_members(self._members))
        return list(unnamed.difference(kept))

    def _cancel_unnamed_timer(self) -> None:
        if self._unnamed_timer is not None:
            self._unnamed_timer.cancel()
            self._unnamed_timer = None

    def _on_lost(self, peer: Peer) -> None:
        self._placements.end_leases(peer)
        if peer.address in self._unnamed_since:
            self._begin_members(self._members)

    def end_loads(self) -> None:
        """`EndsLoads`: a peer that does not answer keeps no server from ending."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        self._cancel_unnamed_timer()
        peers, self._peers = list(self._peers.values()), {}
        self._placements.clear()
        await asyncio.gather(*(peer.close() for peer in peers))

    async def close(self) -> None:
        self.end_loads()
        assert self._ending is not None
        await self._ending
        if self._late:
            await asyncio.wait(set(self._late))
        if self._threads is not None:
            await self._threads.close()
        if self._mapped is not None:
            await self._mapped.close()
        if self._library is not None:
            if self._starting is not None:
                self._starting.cancel()
                await asyncio.gather(self._starting, return_exceptions=True)
            await self._library.close()

    # ---- lookups -----------------------------------------------------------------------------------------------------
    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        return await self.probe_hinted(keys, None)

    async def probe_hinted(self, keys: Sequence[ObjectKey], hint: Hint | None) -> list[int | None]:
        """Asks the peer that the hint names, for as long as it says, and all others about what that one lacks."""
        sizes: list[int | None] = [None] * len(keys)
        hinted_peer = self._named(hint) if hint is not None else None
        # All parts together, and less than the deadline of the call, which would suspend all peers.
        most_seconds = min(limits.MAX_PEER_WAIT_SECONDS, self._config.timeout_seconds / 2)
        until = self._clock.monotonic() + min(hint.wait_seconds if hint is not None else 0.0, most_seconds)
        for first in range(0, len(keys), limits.MAX_PEER_KEYS):
            part = keys[first : first + limits.MAX_PEER_KEYS]
            if hinted_peer is not None:
                left_seconds = max(0.0, until - self._clock.monotonic())
                await self._ask([hinted_peer], part, left_seconds, partial(_merge, sizes, first))
            if None in sizes[first : first + len(part)]:
                others = [peer for peer in self._peers.values() if peer is not hinted_peer]
                await self._ask(others, part, 0.0, partial(_merge, sizes, first))
        return sizes

    def waits_at(self, hint: Hint) -> str | None:
        hinted_peer = self._named(hint) if hint.wait_seconds > 0 else None
        return hinted_peer.address if hinted_peer is not None else None

    async def _ask(
        self, peers: Iterable[Peer], keys: Sequence[ObjectKey], wait_seconds: float, take: Callable[[Answer], None]
    ) -> None:
        """Side by side. Answers that do not come while the request waits are given back."""
        digests, hashes = pack_keys(keys)
        is_waiting = True
        patience_seconds = limits.PEER_PATIENCE_SECONDS + wait_seconds * (1 + _WAIT_MARGIN)

        async def ask(peer: Peer) -> None:
            answer = await peer.lookup(digests, hashes, wait_seconds)
            if answer is None or not any(answer.sizes):
                return
            if not is_waiting:
                peer.release(answer.lease)
                return
            if self._placements.add(peer, answer.lease, keys, answer.sizes, answer.slots):
                take(answer)

        asking = {spawn(ask(peer), "peer-lookup") for peer in peers if peer.may_ask}
        if not asking:
            return
        self._metrics.p2p_lookups.inc(len(asking))
        try:
            _, late = await asyncio.wait(asking, timeout=patience_seconds)
        finally:
            is_waiting = False
            for task in asking:  # they go on: what they find out tells what the peer is worth
                if not task.done():
                    self._late.add(task)
                    task.add_done_callback(self._late.discard)
        self._metrics.p2p_late_lookups.inc(len(late))

    def _named(self, hint: Hint) -> Peer | None:
        """The peer that a hint means, if it is a member and has not been started anew since."""
        try:
            peer = self._peers.get(_name(*host_and_port("The hint", hint.address)))
        except ConfigError:
            return None
        if peer is None or peer.identity is None or (hint.epoch and hint.epoch != peer.identity.epoch):
            return None
        return peer

    # ---- loads -------------------------------------------------------------------------------------------------------
    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        """From the peers that said they have them, and from another one what one of them did not give. Returns when
        nothing writes into the buffers any more, whatever became of it."""
        outcomes = [LoadOutcome.MISSING] * len(keys)
        left = list(range(len(keys)))
        failed: set[Peer] = set()
        gave: dict[Peer, bool] = {}  # anything at all; False only where it was to keep that
        deadline = self._clock.monotonic() + self._config.timeout_seconds * _LOAD_SHARE
        try:
            while (
                self._ending is None
                and self._clock.monotonic() < deadline
                and (shares := self._placements.shares(keys, left, failed))
            ):
                shares = [part for share in shares for part in share.parts(limits.MAX_PEER_READ_KEYS)]
                # Now: what is remembered of a key ends with any load of it.
                transfers = [_transfer_of(share, keys, buffers) for share in shares]
                came = await _each(
                    [self._load_share(share, what, deadline) for share, what in zip(shares, transfers, strict=True)]
                )
                for share, found in zip(shares, came, strict=True):
                    peer = share.holding.peer
                    if isinstance(found, BaseException):
                        peer.load_broke(found)
                        failed.add(peer)
                        continue
                    for index, outcome in zip(share.indices, found, strict=True):
                        if outcome is LoadOutcome.LOADED:
                            outcomes[index] = outcome
                    if found.count(LoadOutcome.LOADED) < len(found):
                        failed.add(peer)
                    if LoadOutcome.LOADED in found:
                        gave[peer] = True
                    elif LoadOutcome.FAILED not in found and share.holding.is_leased(self._clock.monotonic()):
                        gave.setdefault(peer, False)
                if outcomes.count(LoadOutcome.LOADED) == len(outcomes):
                    break
                left = [index for index in left if outcomes[index] is not LoadOutcome.LOADED]
        finally:
            for peer, anything in gave.items():
                if not anything:
                    peer.gave_nothing()
            self._placements.forget(keys)
        return outcomes

    async def _load_share(self, share: Share[Peer], transfer: Transfer, deadline: float) -> list[LoadOutcome]:
        holding = share.holding
        if self._placements.renew(holding):
            holding.peer.renew(holding.lease)
        seconds = min(max(0.0, deadline - self._clock.monotonic()), holding.peer.load_seconds(transfer.room_bytes))
        return await holding.peer.load(transfer.within(seconds))

    # ---- what peers are not asked for --------------------------------------------------------------------------------
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        return [StoreOutcome.FAILED] * len(keys)

    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        return [False] * len(keys)

    async def clear(self) -> tuple[int, int]:
        return 0, 0

    # ---- figures -----------------------------------------------------------------------------------------------------
    def status(self) -> dict[str, Any]:
        peers = [peer.status() for peer in list(self._peers.values())]
        return {"peers": peers}

    def publish(self) -> None:
        """Brings metrics that are read up to date. Any thread."""
        connected = sum(peer.identity is not None for peer in list(self._peers.values()))
        self._metrics.p2p_peers.set(connected)

    def check_idle(self) -> None:
        """AssertionError while something is under way. What peers said they have may still be remembered."""
        assert not self._late, "Lookups at peers are under way"
        for peer in self._peers.values():
            peer.check_idle()


def _mapped_frames() -> MappedFrames | None:
    try:
        return MappedFrames()
    except OSError as error:
        log.warning("Nothing copies out of the memory of peers on this host: their frames come over TCP (%s)", error)
        return None


def _name(host: str, port: int) -> str:
    """Of a peer, as names of hosts have no case."""
    return host_port(host, port).lower()


def _transfer_of(share: Share[Peer], keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Transfer:
    """Without its seconds."""
    holding, indices = share.holding, share.indices
    wanted = [keys[index] for index in indices]
    places = [holding.places[key] for key in wanted]
    into = [buffers[index] for index in indices]
    sizes = [holding.sizes[place] for place in places]
    slots = [holding.slots[place] for place in places] if holding.slots else []
    return Transfer(wanted, into, sizes, slots, holding.lease, sum(buffer.nbytes for buffer in into), 0.0)


async def _each(loads: Sequence[Coroutine[Any, Any, list[LoadOutcome]]]) -> Sequence[list[LoadOutcome] | BaseException]:
    """What each of them returns, or the fault that ends it. A single one needs no task of its own."""
    if len(loads) > 1:
        found: list[list[LoadOutcome] | BaseException] = await asyncio.gather(*loads, return_exceptions=True)
        return found
    try:
        return [await loads[0]]
    except Exception as fault:
        return [fault]


def _merge(sizes: list[int | None], first: int, answer: Answer) -> None:
    for index, size in enumerate(answer.sizes, first):
        sizes[index] = sizes[index] or size or None
