"""Where other servers connect to load from this one: an asyncio loop on a thread of its own, and a few threads that
send.

Engines are served by other threads, so that a peer that asks much slows them by no more than what it copies.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
import threading
from collections import Counter
from weakref import WeakValueDictionary

from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.core.address import host_port
from lmcache.l1.store import L1Store
from lmcache.l2.background import spawn
from lmcache.l2.call_threads import CallThreads
from lmcache.peers.handshake import Introducer
from lmcache.peers.identity import Identity
from lmcache.peers.leases import PeerLeases
from lmcache.peers.serving import ServedPeer, ServingContext, is_expected
from lmcache.peers.sockets import PeerSocket, within
from lmcache.peers.transports.library_process import START_SECONDS, LibraryProcess
from lmcache.telemetry.log_limiter import LogLimiter
from lmcache.telemetry.metrics import P2PMetrics

log = logging.getLogger("lmcache.peers")

_SWEEP_SECONDS = 1.0
_STOP_SECONDS = 3.0
_LOG_SECONDS = 60.0
_ACCEPT_PAUSE_SECONDS = 0.1  # after the machine had no descriptor for a connection


class PeerListener:
    def __init__(
        self,
        listening: socket.socket,
        introducer: Introducer,
        l1: L1Store,
        metrics: P2PMetrics,
        clock: Clock,
        library: LibraryProcess | None = None,
    ) -> None:
        """`listening` does not block, and is closed at the end. `library` is started and ended here."""
        self._listening = listening
        self._introducer = introducer
        self._l1 = l1
        self._metrics = metrics
        self._clock = clock
        self._library = library
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._leases = PeerLeases(l1.core, l1.core.stats()["capacity_bytes"], clock)
        self._tasks: list[asyncio.Task[None]] = []
        self._connections: dict[PeerSocket, asyncio.Task[None]] = {}
        self._handshakes: dict[PeerSocket, None] = {}  # the oldest first
        self._served: Counter[str] = Counter()  # connections, by the address that peers say is theirs
        # By host, for as long as it has a connection: one that takes nothing of what it reads keeps no other waiting.
        self._sends: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._waits = 0
        self._log_limiter = LogLimiter(_LOG_SECONDS, clock)
        self._stopped = False

    @property
    def address(self) -> str:
        return host_port(*self._listening.getsockname()[:2])

    def start(self) -> None:
        """ResourceError where the transfer engine cannot be used."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(2 * START_SECONDS)

    def stop(self) -> bool:
        """Ends every connection, with their leases; nothing of L1 is sent any more. False when a send has not ended: L1
        must stay mapped. Idempotent."""
        if self._stopped:
            return True
        self._stopped = True
        ended = True
        if self._thread.ident is not None:
            closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
            try:
                closing.result(_STOP_SECONDS)
            except concurrent.futures.TimeoutError:
                ended = False
                log.warning("A connection of a peer has not ended within %.0f s; it is left behind", _STOP_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_STOP_SECONDS)
        self._listening.close()
        return ended

    def status(self) -> dict[str, object]:
        """Any thread."""
        return {
            "listens_at": self.address,
            "connections": dict(self._served),
            "leases": len(self._leases),
            "leased_bytes": self._leases.size_bytes,
            "waiting_lookups": self._waits,
        }

    def publish(self) -> None:
        """Brings metrics that are read up to date. Any thread."""
        self._metrics.p2p_leased_bytes.set(self._leases.size_bytes)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _open(self) -> None:
        threads = CallThreads("peer-send", limits.PEER_SEND_THREADS)
        self._context = ServingContext(self._l1, self._leases, threads, self._metrics, self._clock, self._library)
        if self._library is not None:
            await self._library.start()
        self._tasks += [spawn(self._accept(), "peer-accept"), spawn(self._sweep(), "peer-leases")]

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for sock in self._connections:
            sock.cut()
        for task in list(self._connections.values()):
            task.cancel()  # a native send ends with its socket, and its task not before
        await asyncio.gather(*self._tasks, *self._connections.values(), return_exceptions=True)
        await self._context.threads.close()
        if self._library is not None:
            await self._library.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self._leases.end_expired()

    # ---- connections -------------------------------------------------------------------------------------------------
    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listening)
            except OSError as error:  # no descriptor is free, or the caller has gone
                log.debug("A peer could not be let in: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_SECONDS)
                continue
            sock = PeerSocket(accepted)
            if len(self._connections) >= limits.MAX_PEER_CONNECTIONS:
                sock.close()
                if self._log_limiter.due("full"):
                    log.warning("A peer is not served: %d connections are open already", len(self._connections))
                continue
            if len(self._handshakes) >= limits.MAX_PEER_HANDSHAKES:
                oldest = next(iter(self._handshakes))  # it has had its time
                del self._handshakes[oldest]
                oldest.cut()
            self._handshakes[sock] = None
            self._connections[sock] = spawn(self._serve(sock), "peer-connection")
            await asyncio.sleep(0)  # callers that wait already are let in without a turn of anybody else

    async def _serve(self, sock: PeerSocket) -> None:
        where = "a caller"
        try:
            try:
                peer = await within(limits.PEER_HELLO_SECONDS, self._introducer.accept(sock))
            finally:
                self._handshakes.pop(sock, None)
            where = peer.address
            await self._serve_known(sock, peer)
        except Exception as fault:  # the root of a connection: it costs nobody else anything
            if not is_expected(fault):
                log.exception("A connection of the peer %s ended by a fault", where)
            elif isinstance(fault, EOFError | ConnectionError):
                log.debug("A connection of the peer %s ended: %s", where, fault)
            else:
                await self._end(sock, where, fault)
        finally:
            del self._connections[sock]
            sock.close()

    async def _serve_known(self, sock: PeerSocket, peer: Identity) -> None:
        key = peer.address if peer.address in self._served or len(self._served) < limits.MAX_PEERS else ""
        self._served[key] += 1
        try:
            sends = self._sends.setdefault(sock.host, asyncio.Semaphore(limits.MAX_PEER_SENDS))
            await ServedPeer(sock, self._context, sends, self._may_wait).run()
        finally:
            self._served -= Counter({key: 1})  # addresses without any are left out

    def _may_wait(self, change: int) -> bool:
        if change > 0 and self._waits >= limits.MAX_PEER_WAITS:
            return False
        self._waits += change
        return True

    async def _end(self, sock: PeerSocket, where: str, fault: BaseException) -> None:
        """Says to both sides why."""
        sentence = str(fault) or "it did not answer in time"
        if self._log_limiter.due():
            log.warning("The peer %s is not served: %s", where, sentence)
        try:
            await within(_ACCEPT_PAUSE_SECONDS, sock.refuse(0, sentence))
        except asyncio.TimeoutError:
            pass
