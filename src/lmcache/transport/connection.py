"""The client's end of one connection: calls by whoever makes them, answers read by whoever waits.

There is no thread that reads: a thread that waits for an answer reads the socket itself and hands the answers of others
over (the *leader*; the others wait to be woken). A call costs no change of threads, and an engine whose interpreter is
busy does not delay its own answers. A connection is never repaired: once broken, every call on it fails at once and its
owner opens another.

Locking: `_lock` guards the sockets, `_pendings`, `_leader` and `_followers`. It is never held while waiting.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast, get_type_hints

import msgspec
import zmq

from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.errors import ConfigError, KeyRefused, ProtocolError, RemoteError, ServerUnavailable
from lmcache.transport import wire
from lmcache.transport.curve_keys import z85_encode

Reply = TypeVar("Reply", bound=msgspec.Struct)

_LONGEST_POLL_SECONDS = 3600.0
_NEVER_MS = 1 << 30
_MORE = zmq.SNDMORE | zmq.NOBLOCK  # for every frame of a message but the last
_READABLE = int(zmq.POLLIN)  # arithmetic with the enumeration costs as much as the call whose result it tests
_BROKEN_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_MONITOR_STOPPED
)


class Pending(Generic[Reply]):
    """An answer that is on its way. Settles by itself at its deadline, when it is looked at."""

    def __init__(self, connection: Connection, call_id: int, decoder: Any, method: str, deadline: float) -> None:
        self.method = method
        self.call_id = call_id
        self.deadline = deadline
        self.woken: threading.Event | None = None
        self._connection = connection
        self._decoder = decoder
        self._outcome: Reply | Exception | None = None

    @property
    def settled(self) -> bool:
        return self._outcome is not None

    @property
    def error(self) -> Exception | None:
        return self._outcome if isinstance(self._outcome, Exception) else None

    def done(self) -> bool:
        """Whether `result` has an answer or an error to give. Never waits."""
        return self._outcome is not None or self._connection.look(self)

    def wait(self, seconds: float) -> bool:
        """Waits at most that long, and never past the call's own deadline."""
        return self._outcome is not None or self._connection.wait(self, seconds)

    def result(self) -> Reply:
        """Waits to the deadline. RemoteError: refused by the server; ServerUnavailable: no answer."""
        self.wait(float("inf"))
        outcome = self._outcome
        if isinstance(outcome, Exception):
            raise outcome
        return cast(Reply, outcome)

    def cancel(self) -> None:
        """Nobody wants the answer any more. The server is not notified."""
        self._connection.forget(self)

    def settle(self, status: bytes, payload: bytes | memoryview) -> None:
        if status != wire.STATUS_OK:
            self.fail(RemoteError(status.decode("ascii", "replace"), wire.decode_sentence(bytes(payload))))
            return
        try:
            self._outcome = self._decoder.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.fail(ProtocolError(f"The server's answer to {self.method} cannot be read: {error}"))

    def fail(self, error: Exception) -> None:
        if self._outcome is None:
            self._outcome = error


class Connection:
    """One connection to one server process. Thread-safe, but for `wait_established` and `wait_broken`: one thread."""

    def __init__(
        self,
        endpoint: str,
        context: zmq.Context[Any],
        clock: Clock,
        on_trouble: Callable[[Exception], None] | None = None,
        curve: tuple[bytes, bytes] | None = None,
    ) -> None:
        """`curve`: (server's public key, own secret key). `on_trouble` is called for every call that failed, under the
        connection's lock: it may only take notes."""
        self.endpoint = endpoint
        self._on_trouble = on_trouble or (lambda error: None)
        self._clock = clock
        self._lock = threading.Lock()
        self._pendings: dict[int, Pending[Any]] = {}
        self._followers: dict[int, Pending[Any]] = {}
        self._leader: Pending[Any] | None = None
        self._next_call_id = 0
        self._decoders: dict[type[Any], Any] = {}
        self._broken: str = ""
        self._key_refused = False
        self._closed = False
        self._has_large_answers = False
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Not -1: ZMQ would then discard answers that had arrived before the connection ended.
        self._socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, 2 * limits.MAX_CALLS_IN_FLIGHT_PER_CLIENT)  # given up ones included
        self._socket.setsockopt(zmq.RCVHWM, 2 * limits.MAX_CALLS_IN_FLIGHT_PER_CLIENT)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._proves = curve is not None
        if curve is not None:
            self._prove_with(*curve)
        self._established = False
        self._interrupted = False
        self._monitor = self._socket.get_monitor_socket(_BROKEN_EVENTS | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._reader_wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watcher_wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._readers = select.poll()
        self._readers.register(cast(int, self._socket.getsockopt(zmq.FD)), select.POLLIN)
        self._readers.register(self._reader_wake_fd, select.POLLIN)
        self._monitor_fd = cast(int, self._monitor.getsockopt(zmq.FD))
        self._readers.register(self._monitor_fd, select.POLLIN)
        self._watchers = select.poll()
        self._watchers.register(self._monitor_fd, select.POLLIN)
        self._watchers.register(self._watcher_wake_fd, select.POLLIN)
        self._socket.connect(endpoint)

    def _prove_with(self, server_public: bytes, secret: bytes) -> None:
        if not zmq.has("curve"):
            self._socket.close(0)
            raise ConfigError("The libzmq of this engine was built without CURVE: install pyzmq from its wheel.")
        text = z85_encode(secret).encode()
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, z85_encode(server_public).encode())
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(text))
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, text)

    @property
    def broken(self) -> str:
        """ "" while the connection may be used, else why not."""
        return self._broken

    @property
    def calls_in_flight(self) -> int:
        """Calls that wait for their answer."""
        return len(self._pendings)

    # ---- calls -------------------------------------------------------------------------------------------------------
    def submit(
        self, method: str, message: msgspec.Struct, reply_type: type[Reply], timeout_seconds: float
    ) -> Pending[Reply]:
        """Sends a call. ServerUnavailable at once when the connection is broken or full."""
        payload = wire.encode_payload(message)
        if len(payload) > limits.MAX_MESSAGE_BYTES:
            raise ProtocolError(f"A {method} call of {len(payload)} bytes is beyond {limits.MAX_MESSAGE_BYTES} bytes.")
        decoder = self._decoders.get(reply_type)
        if decoder is None:
            decoder = self._decoders[reply_type] = wire.decoder_of(reply_type)
            if memoryview in get_type_hints(reply_type).values():  # an answer that is a view of its message
                self._has_large_answers = True
        deadline = self._clock.monotonic() + timeout_seconds
        with self._lock:
            if self._broken:
                raise ServerUnavailable(self._broken)
            if self.calls_in_flight >= limits.MAX_CALLS_IN_FLIGHT_PER_CLIENT:
                self._drop_expired()
                if self.calls_in_flight >= limits.MAX_CALLS_IN_FLIGHT_PER_CLIENT:
                    raise ServerUnavailable(f"{self.calls_in_flight} calls already wait for {self.endpoint}.")
            call_id = self._next_call_id
            self._next_call_id = (call_id + 1) & 0xFFFF_FFFF_FFFF_FFFF
            pending: Pending[Reply] = Pending(self, call_id, decoder, method, deadline)
            try:
                self._socket.send(wire.pack_call_id(call_id), _MORE)
                self._socket.send(method.encode(), _MORE)
                self._socket.send(payload, zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise ServerUnavailable(f"Nothing more can be sent to {self.endpoint}: {error}.") from error
            self._pendings[call_id] = pending
            # Sending may have swallowed the signal of an arrived answer: read now, or its waiter would sleep on.
            self._read_answers()
        return pending

    def look(self, pending: Pending[Any]) -> bool:
        """Reads what has arrived; whether `pending` is settled by it, by a break or by its deadline."""
        with self._lock:
            self._read_answers()
            if not pending.settled and self._clock.monotonic() >= pending.deadline:
                self._expire(pending)
            return pending.settled

    def wait(self, pending: Pending[Any], seconds: float) -> bool:
        give_up = min(self._clock.monotonic() + seconds, pending.deadline)
        while True:
            with self._lock:
                self._read_answers(pending)
                remaining = give_up - self._clock.monotonic()
                if not pending.settled and remaining <= 0 and give_up == pending.deadline:
                    self._expire(pending)
                if pending.settled or remaining <= 0:
                    self._followers.pop(pending.call_id, None)
                    self._promote()
                    return pending.settled
                leads = self._leader is None
                if leads:
                    self._leader = pending
                    self._followers.pop(pending.call_id, None)
                else:
                    if pending.woken is None:
                        pending.woken = threading.Event()
                    pending.woken.clear()
                    self._followers[pending.call_id] = pending
            if leads:
                self._lead(remaining)
            else:
                assert pending.woken is not None
                pending.woken.wait(remaining)

    def _lead(self, seconds: float) -> None:
        """Waits until there is something to read or the leader's own answer was read by another thread."""
        left = True
        try:
            ready = self._readers.poll(min(seconds, _LONGEST_POLL_SECONDS) * 1000)
            left = False
        finally:
            with self._lock:
                self._leader = None
                if left:  # interrupted: this thread may never come back
                    self._promote()
        for fd, _ in ready:
            if fd == self._reader_wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
            elif fd == self._monitor_fd:
                with self._lock:
                    self._read_monitor()

    def forget(self, pending: Pending[Any]) -> None:
        with self._lock:
            self._pendings.pop(pending.call_id, None)
            pending.fail(ServerUnavailable(f"The {pending.method} call was given up."))
            self._notify(pending)

    # ---- state -------------------------------------------------------------------------------------------------------
    def wait_established(self, seconds: float) -> None:
        """Waits for the greeting of the other side. ServerUnavailable when it does not come, KeyRefused when it is a
        refusal."""
        self._watch(seconds, lambda: self._established)
        if self._key_refused:
            raise KeyRefused(self._broken)
        if self._broken or not self._established:
            raise ServerUnavailable(self._broken or f"Nothing answers at {self.endpoint}.")

    def wait_broken(self, seconds: float) -> bool:
        """Waits until the connection breaks, `interrupt` is called, or the time is over; whether it is broken."""
        self._watch(seconds, lambda: self._interrupted)
        self._interrupted = False
        return bool(self._broken)

    def _watch(self, seconds: float, enough: Callable[[], bool]) -> None:
        give_up = self._clock.monotonic() + seconds
        while True:
            with self._lock:
                self._read_monitor()
            remaining = give_up - self._clock.monotonic()
            if self._broken or enough() or remaining <= 0:
                return
            self._watchers.poll(min(remaining, _LONGEST_POLL_SECONDS) * 1000)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._watcher_wake_fd)

    def interrupt(self) -> None:
        """Ends a `wait_broken` early. Takes no lock."""
        self._interrupted = True
        os.eventfd_write(self._watcher_wake_fd, 1)

    def close(self) -> None:
        """By the thread that calls `wait_broken`, or when no such thread runs. Idempotent."""
        with self._lock:
            self._break(f"The connection to {self.endpoint} was closed.")
            if self._closed:
                return
            self._closed = True
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)
            # A waiter that has just been woken may still poll these two; they are closed with this object.

    def __del__(self) -> None:
        for fd in (getattr(self, "_reader_wake_fd", -1), getattr(self, "_watcher_wake_fd", -1)):
            if fd >= 0:
                os.close(fd)

    # ---- under the lock ----------------------------------------------------------------------------------------------
    def _read_answers(self, wanted: Pending[Any] | None = None) -> None:
        """Everything that has arrived; only up to the wanted answer while nobody sleeps over the socket: whoever
        waits next reads on before it sleeps."""
        while not self._closed and self._socket.getsockopt(zmq.EVENTS) & _READABLE:
            frames = self._receive()
            if len(frames) != wire.CALL_FRAMES or len(frames[0]) != wire.CALL_ID_BYTES:
                self._break(f"What listens on {self.endpoint} does not speak this protocol.")
                return
            pending = self._pendings.pop(wire.unpack_call_id(bytes(frames[0])), None)
            if pending is not None:  # None: given up, or expired
                pending.settle(bytes(frames[1]), frames[2])
                if pending.error is not None:
                    self._on_trouble(pending.error)
                if pending is not wanted:
                    self._notify(pending)
                elif self._leader is None:
                    return

    def _receive(self) -> Sequence[bytes | memoryview]:
        """The frames of one answer; where large ones come, without a copy of them."""
        if not self._has_large_answers:
            return cast(list[bytes], self._socket.recv_multipart(zmq.NOBLOCK))
        return [frame.buffer for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)]

    def _notify(self, pending: Pending[Any]) -> None:
        """Wakes the thread that waits for it, if any; the leader's own thread finds out by itself."""
        if pending is self._leader:
            os.eventfd_write(self._reader_wake_fd, 1)
        elif self._followers.pop(pending.call_id, None) is not None:
            assert pending.woken is not None
            pending.woken.set()

    def _promote(self) -> None:
        """Somebody must read while somebody waits."""
        if self._leader is None and self._followers:
            follower = next(iter(self._followers.values()))
            assert follower.woken is not None
            follower.woken.set()

    def _expire(self, pending: Pending[Any]) -> None:
        self._pendings.pop(pending.call_id, None)
        pending.fail(error := ServerUnavailable(f"{self.endpoint} did not answer {pending.method} in time."))
        self._on_trouble(error)

    def _drop_expired(self) -> None:
        now_seconds = self._clock.monotonic()
        for pending in [pending for pending in self._pendings.values() if now_seconds >= pending.deadline]:
            self._expire(pending)
            self._notify(pending)

    def _break(self, reason: str) -> None:
        if self._broken:
            return
        self._broken = reason
        pendings = list(self._pendings.values())
        self._pendings.clear()
        for pending in pendings:
            pending.fail(ServerUnavailable(reason))
            self._notify(pending)
        os.eventfd_write(self._watcher_wake_fd, 1)

    def _read_monitor(self) -> None:
        """What ZMQ tells of the connection itself."""
        if self._closed or not self._monitor.getsockopt(zmq.EVENTS) & _READABLE:
            return
        self._read_answers()  # what arrived before the end still counts
        while self._monitor.getsockopt(zmq.EVENTS) & _READABLE:
            event = struct.unpack_from("<H", self._monitor.recv_multipart(zmq.NOBLOCK)[0])[0]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._established = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._key_refused = True
                self._break(f"The server at {self.endpoint} does not let this client's CURVE key in.")
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._break(
                    f"The server at {self.endpoint} speaks CURVE and this client does not, or the reverse, or its key "
                    "is not the one that this client expects."
                )
            elif self._established:
                self._break(f"{self.endpoint} closed the connection.")
            elif self._proves and event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
                self._break(f"{self.endpoint} ended the handshake: its CURVE key is not the one that is expected here.")
            else:
                self._break(f"Nothing answers at {self.endpoint}.")
        os.eventfd_write(self._watcher_wake_fd, 1)  # another thread may be the one that waits for this
