"""All connections of the server: accepted, watched, limited, closed. Belongs to the message loop."""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.errors import ProtocolError
from lmcache.transport import wire
from lmcache.transport.backlog import Backlog
from lmcache.transport.deferred import Bulk
from lmcache.transport.forks import not_for_children
from lmcache.transport.listening import EngineListener
from lmcache.transport.peer import Peer
from lmcache.transport.timers import Timer
from lmcache.transport.zmtp import NO_MESSAGE, Message

if TYPE_CHECKING:
    from lmcache.transport.curve import CurveSession
    from lmcache.transport.curve_clients import CurveClient

_HANDSHAKE_SECONDS = 10.0
_ACCEPT_PAUSE_SECONDS = 0.1  # without a free descriptor
_EVENTS_AT_ONCE = 64
_ACCEPTS_AT_ONCE = 64
_ENOUGH_UNSENT_BYTES = 16 << 20  # of a peer; it is not listened to until it has taken some
_KEEPALIVE_IDLE_SECONDS = 60


@dataclass(frozen=True)
class RpcLimits:
    """What peers may make the server hold, each by itself and all together."""

    message_bytes: int = limits.MAX_MESSAGE_BYTES
    connections: int = limits.MAX_CONNECTIONS
    handshakes: int = limits.MAX_HANDSHAKES
    unfinished_bytes: int = limits.MAX_UNFINISHED_BYTES
    unsent_bytes: int = limits.MAX_UNSENT_BYTES
    unsent_bytes_per_connection: int = limits.MAX_UNSENT_BYTES_PER_CONNECTION
    deferred_calls: int = limits.MAX_DEFERRED_CALLS
    deferred_calls_per_connection: int = limits.MAX_CALLS_IN_FLIGHT_PER_CLIENT


class Peers:
    """ResourceError when it cannot listen."""

    def __init__(
        self,
        host: str,
        port: int,
        rpc_limits: RpcLimits,
        clock: Clock,
        call_later: Callable[[float, Callable[[], None]], Timer],
        on_trouble: Callable[[str, str], None],
        on_resumed: Callable[[Peer], None],
        curve: Callable[[], CurveSession] | None = None,
    ) -> None:
        """`curve` makes what a connection proves itself to; None for the mechanism NULL.
        `on_trouble`: (kind, sentence) of what a peer did wrong. `on_resumed`: its messages are handed out again."""
        self._limits = rpc_limits
        self._clock = clock
        self._call_later = call_later
        self._trouble = on_trouble
        self._on_resumed = on_resumed
        self._peers: dict[int, Peer] = {}
        self._new_session = curve
        self._strangers: dict[Peer, None] = {}  # in their handshake, in the order in which they came
        self._unserved: dict[Peer, None] = {}  # of whom no call has succeeded yet, in that order, too
        self.unfinished: Backlog[Peer] = Backlog(rpc_limits.unfinished_bytes)
        self._unsent: Backlog[Peer] = Backlog(rpc_limits.unsent_bytes)
        self._to_flush: dict[Peer, None] = {}
        self._listener = EngineListener(host, port, clock)
        self._listening = self._listener.socket
        self.endpoint = self._listener.endpoint
        self._epoll = select.epoll()
        self.watch(self._listening.fileno())
        self.closed = False

    # ---- waiting -----------------------------------------------------------------------------------------------------
    def watch(self, fd: int) -> None:
        self._epoll.register(fd, select.EPOLLIN)

    def poll(self, wait_ms: float | None) -> list[tuple[int, int]]:
        return self._epoll.poll(None if wait_ms is None else wait_ms / 1000, _EVENTS_AT_ONCE)

    def ready(self, fd: int, events: int) -> Peer | None:
        """Moves what can be moved; the peer that may have a message then."""
        if fd == self._listening.fileno():
            self._accept()
            return None
        peer = self._peers.get(fd)
        if peer is None:
            return None
        if events & select.EPOLLOUT:
            self.flush(peer)
        if _deaf(peer) and events & (select.EPOLLHUP | select.EPOLLERR):  # reported as long as the peer is watched
            self._close(peer)
        if peer.closed or peer.has_turn or _deaf(peer):
            return None
        if events & ~select.EPOLLOUT:
            try:
                if not peer.receive():
                    self._close(peer)
            except BlockingIOError:
                pass
            except OSError:
                self._close(peer)
        return None if peer.closed else peer

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, address = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._trouble("refused", f"a connection cannot be accepted: {error.strerror}")
                    self._epoll.unregister(self._listening.fileno())
                    self._call_later(_ACCEPT_PAUSE_SECONDS, lambda: self.watch(self._listening.fileno()))
                    return
                continue  # it has gone already
            if len(self._peers) >= self._limits.connections and not self._make_room():
                self._trouble("refused", f"there are {len(self._peers)} connections already")
                sock.close()
                continue
            self._welcome(sock, self.endpoint if sock.family == socket.AF_UNIX else f"{address[0]}:{address[1]}")

    def _make_room(self) -> bool:
        """Whoever holds a connection and calls nothing must not keep an engine out."""
        oldest = next(iter(self._unserved), None)
        if oldest is None:
            return False
        self._end(
            oldest, f"there are {len(self._peers)} connections, and it is the oldest without a call that succeeded"
        )
        return True

    def _welcome(self, sock: socket.socket, name: str) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_SECONDS)
        curve = self._new_session() if self._new_session is not None else None
        peer = Peer(not_for_children(sock), name, self._limits.message_bytes, curve)
        self._peers[peer.fd] = peer
        self._strangers[peer] = self._unserved[peer] = None
        if len(self._strangers) > self._limits.handshakes:
            self._end(
                next(iter(self._strangers)), "too many connections are in their handshake; this one is the oldest"
            )
        self._epoll.register(peer.fd, peer.events)

        def give_up() -> None:
            if not peer.reader.established:
                self._end(peer, "the handshake did not come in time")

        peer.handshake_timer = self._call_later(_HANDSHAKE_SECONDS, give_up)
        self.flush(peer)

    # ---- in ----------------------------------------------------------------------------------------------------------
    def next_message(self, peer: Peer) -> Message | None:
        """Returns `Peer.next_message`, and None for a peer that has gone or must first take answers."""
        peer.held_back = _deaf(peer)
        if peer.closed or peer.held_back:
            return None
        try:
            message = peer.next_message()
        except ProtocolError as error:
            peer.refuse(error)
            self.flush(peer)
            self._end(peer, str(error))
            return None
        if peer.reader.established and peer.handshake_timer is not None:
            peer.handshake_timer.cancel()
            peer.handshake_timer = None
            self._strangers.pop(peer, None)
        if message is None:
            self.unfinished.set(peer, peer.reader.unfinished_bytes)
            while (oldest := self.unfinished.surplus()) is not None:
                self._end(oldest, "too much waits for the rest of messages; this one began first")
        elif message is not NO_MESSAGE:
            self.unfinished.set(peer, 0)  # what follows begins now
        return message

    # ---- out ---------------------------------------------------------------------------------------------------------
    def answer(self, peer: Peer, call_id: bytes, status: bytes, payload: bytes | Bulk) -> None:
        """Queued; sent by the next `flush` of the peer or of all."""
        if peer.closed:
            if isinstance(payload, Bulk):
                payload.sent = True
            return
        if status == wire.STATUS_OK:
            self._unserved.pop(peer, None)
        peer.queue_answer(call_id, status, payload)
        self._to_flush[peer] = None

    def flush_answers(self) -> None:
        for peer in list(self._to_flush):
            self.flush(peer)

    def flush(self, peer: Peer) -> None:
        """Sends what the network takes."""
        self._to_flush.pop(peer, None)
        if peer.closed:
            return
        try:
            peer.flush()
        except OSError:
            self._close(peer)
            return
        self._unsent.set(peer, peer.unsent_bytes)
        if peer.unsent_bytes > self._limits.unsent_bytes_per_connection:
            self._end(peer, f"it takes no answers: {peer.unsent_bytes} bytes wait for it")
            return
        while (oldest := self._unsent.surplus()) is not None:
            self._end(oldest, "too many answers wait to be taken; its answers wait for the longest time")
        events = (0 if _deaf(peer) else select.EPOLLIN) | (select.EPOLLOUT if peer.unsent_bytes else 0)
        if peer.closed:
            return
        if events != peer.events:
            peer.events = events
            self._epoll.modify(peer.fd, events)
        if peer.held_back and not _deaf(peer):
            peer.held_back = False
            self._on_resumed(peer)

    # ---- the end -----------------------------------------------------------------------------------------------------
    def _end(self, peer: Peer, reason: str) -> None:
        self._trouble("closed", f"the connection of {peer.name} is closed: {reason}")
        self._close(peer)

    def _close(self, peer: Peer) -> None:
        if peer.closed:
            return
        self.unfinished.set(peer, 0)
        self._unsent.set(peer, 0)
        self._to_flush.pop(peer, None)
        del self._peers[peer.fd]
        self._strangers.pop(peer, None)
        self._unserved.pop(peer, None)
        self._epoll.unregister(peer.fd)
        if peer.handshake_timer is not None:
            peer.handshake_timer.cancel()
        peer.close()

    def end_clients(self, is_allowed: Callable[[CurveClient], bool]) -> None:
        """Ends the connections of those that are not allowed any more, or otherwise than before."""
        for peer in list(self._peers.values()):
            if peer.client is not None and not is_allowed(peer.client):
                self._end(peer, f"the key {peer.client.name} was removed or changed")

    def close(self, linger_seconds: float) -> None:
        """Gives answers that are queued a moment to leave."""
        self.closed = True
        give_up = self._clock.monotonic() + linger_seconds
        self.flush_answers()
        while self._unsent.size_bytes and (left := give_up - self._clock.monotonic()) > 0:
            for fd, events in self._epoll.poll(min(left, 0.01), _EVENTS_AT_ONCE):
                if fd in self._peers and events & ~select.EPOLLIN:
                    self.flush(self._peers[fd])
        for peer in list(self._peers.values()):
            self._close(peer)
        self._listener.close()
        self._epoll.close()


def _deaf(peer: Peer) -> bool:
    """Whether nothing more is read from it until it has taken answers."""
    return peer.unsent_bytes > _ENOUGH_UNSENT_BYTES
