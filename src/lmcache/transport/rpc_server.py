"""The server's message loop: one thread, all connections.

Invariants: a call whose call id can be read gets exactly one answer; nothing that a peer sends ends the loop; no
handler waits. What takes long returns a `Deferred` and answers it later from any thread. What a peer makes the server
hold, of messages that are not whole and of answers that it does not take, is limited for each and for all.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from lmcache.clock import Clock
from lmcache.errors import RemoteError
from lmcache.telemetry.log_limiter import LogLimiter
from lmcache.telemetry.metrics import RpcMetrics
from lmcache.transport import wire
from lmcache.transport.deferred import Answer, Bulk, Deferred
from lmcache.transport.peer import Peer
from lmcache.transport.peers import Peers, RpcLimits
from lmcache.transport.timers import Timer, Timers
from lmcache.transport.zmtp import NO_MESSAGE, Message

if TYPE_CHECKING:
    from lmcache.transport.curve_clients import CurveClient
    from lmcache.transport.curve_gate import CurveGate

log = logging.getLogger("lmcache.transport")

_TURN_MESSAGES = 16  # of one peer, or ...
_TURN_SECONDS = 0.001  # ... begun in that time; then others, timers and posted work get their turn
_LINGER_SECONDS = 0.5
_FAULT_PAUSE_SECONDS = 0.05
_PR_SET_TIMERSLACK = 29  # prctl.h
_TIMER_SLACK_NANOSECONDS = 1
_QUIET_SECONDS = 10.0  # at most one log line per kind of protocol error in that time


Handler = Callable[[Any], "msgspec.Struct | Deferred"]


@dataclass(frozen=True)
class Method:
    """How one method is decoded and handled. Handlers run on the loop; a RemoteError they raise is the answer."""

    request: type[msgspec.Struct]
    handler: Handler
    may_defer: bool = False  # then it is refused, before it begins, while too many calls wait for their answer


class _Route:
    __slots__ = ("calls", "decode", "handler", "may_defer", "name", "seconds")

    def __init__(self, name: str, method: Method) -> None:
        self.name = name
        self.decode = wire.decoder_of(method.request).decode
        self.handler = method.handler
        self.may_defer = method.may_defer
        self.calls: dict[str, Any] = {}  # status -> metric child
        self.seconds: Any = None  # metric child


class RpcServer:
    """Binds at construction (ResourceError when it cannot), serves from `start` to `stop`."""

    def __init__(
        self,
        bind_host: str,
        port: int,
        clock: Clock,
        metrics: RpcMetrics | None = None,
        rpc_limits: RpcLimits | None = None,
        curve: CurveGate | None = None,
    ) -> None:
        """`curve`: clients have to prove who they are; None: whoever can connect may call."""
        self.caller: CurveClient | None = None  # whose call is being handled; for handlers
        self._curve = curve
        self._clock = clock
        self._limits = rpc_limits or RpcLimits()
        self._metrics = metrics
        self._routes: dict[bytes, _Route] = {}
        self._posted: deque[Callable[[], None]] = deque()
        self._timers = Timers(self._clock)
        self._deferred: dict[int, Deferred] = {}
        self._deferred_order = itertools.count()
        self._log_limiter = LogLimiter(_QUIET_SECONDS, self._clock)
        self._stopping = False
        self._draining = False
        self._thread = threading.Thread(target=self._run, name="lmcache-rpc", daemon=True)
        self.peers = Peers(
            bind_host,
            port,
            self._limits,
            self._clock,
            self.call_later,
            self._trouble,
            self._go_on_later,
            curve.session if curve is not None else None,
        )
        self.endpoint = self.peers.endpoint
        self._ready: deque[Peer] = deque()  # those of whom more messages are there
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.peers.watch(self._wake_fd)
        # Open as long as anybody can post: the number could soon be that of somebody else's file.
        weakref.finalize(self, os.close, self._wake_fd).atexit = False  # type: ignore[misc]

    # ---- any thread --------------------------------------------------------------------------------------------------
    def start(self, methods: Mapping[str, Method]) -> None:
        self._routes = {name.encode(): _Route(name, method) for name, method in methods.items()}
        if self._curve is not None:
            self._curve.start(self._end_revoked)
        self._thread.start()

    def _end_revoked(self, is_allowed: Callable[[CurveClient], bool]) -> None:
        self.post(lambda: self.peers.end_clients(is_allowed))

    def post(self, action: Callable[[], None]) -> None:
        """Runs `action` on the loop soon. Never blocks."""
        self._posted.append(action)
        if threading.current_thread() is not self._thread:
            with contextlib.suppress(BlockingIOError):  # it will wake up anyway
                os.eventfd_write(self._wake_fd, 1)

    def responsive(self, within_seconds: float) -> bool:
        """Whether the loop takes a turn in that time. Not to be called on the loop."""
        turned = threading.Event()
        self.post(turned.set)
        return turned.wait(within_seconds)

    def drain(self) -> None:
        """From now on every call but ping is refused with SHUTTING_DOWN."""
        self._draining = True

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Answers what is still deferred with SHUTTING_DOWN and ends the loop. Idempotent."""
        self._stopping = True
        if self._curve is not None:
            self._curve.stop()
        if self._thread.is_alive():
            self.post(lambda: None)
            self._thread.join(timeout_seconds)
        elif not self.peers.closed:  # never started
            self._close()

    # ---- loop thread -------------------------------------------------------------------------------------------------
    def call_later(self, delay_seconds: float, action: Callable[[], None]) -> Timer:
        """On the loop thread, or before `start`."""
        return self._timers.add(delay_seconds, action)

    def _run(self) -> None:
        _end_waits_in_time()
        try:
            while not self._stopping:
                try:
                    self._turn()
                except Exception:
                    log.exception("The message loop met a fault and goes on")
                    self._count_protocol_error(wire.INTERNAL)
                    self._clock.sleep(_FAULT_PAUSE_SECONDS)  # a fault that stays must not take the whole processor
        finally:
            self._close()

    def _turn(self) -> None:
        for _ in range(len(self._ready)):
            self._serve(self._ready.popleft())
        for _ in range(len(self._posted)):
            self._guarded(self._posted.popleft())
        wait_ms, _ = self._timers.run_due(self._guarded)
        self.peers.flush_answers()
        if self._ready or self._posted or self._stopping:
            wait_ms = 0
        for fd, events in self.peers.poll(wait_ms):
            if fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
                continue
            peer = self.peers.ready(fd, events)
            if peer is not None:
                self._serve(peer)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            log.exception("Work on the message loop failed")

    def _serve(self, peer: Peer) -> None:
        """Handles what has arrived of a peer, for a while."""
        peer.has_turn = False
        until = self._clock.monotonic() + _TURN_SECONDS
        for _ in range(_TURN_MESSAGES):
            frames = self.peers.next_message(peer)
            if frames is None:
                break
            if frames:
                self._receive(peer, frames)
            elif frames is not NO_MESSAGE:
                self._trouble("dropped", f"a message that has not {wire.CALL_FRAMES} frames")
            if self._clock.monotonic() >= until:
                self._go_on_later(peer)
                break
        else:
            self._go_on_later(peer)
        self.peers.flush(peer)

    def _go_on_later(self, peer: Peer) -> None:
        if not peer.has_turn:
            peer.has_turn = True
            self._ready.append(peer)

    def _receive(self, peer: Peer, frames: Message) -> None:
        call_id, method, payload = frames
        if len(call_id) != wire.CALL_ID_BYTES:
            self._trouble("dropped", f"a call id that is not {wire.CALL_ID_BYTES} bytes")
            return
        call_id = bytes(call_id)
        route = self._routes.get(bytes(method)) if len(method) <= wire.MAX_METHOD_BYTES else None
        if route is None:
            self._refuse(peer, call_id, wire.UNKNOWN_METHOD, f"There is no method {bytes(method[:64])!r}.")
            return
        if self._draining and route.name != "ping":
            self._send(peer, call_id, route, RemoteError(wire.SHUTTING_DOWN, "The server is shutting down."))
            return
        if route.may_defer and self._too_many_wait(peer):
            refusal = RemoteError(wire.TOO_MANY, "Too many calls wait for an answer; try again later.")
            self._send(peer, call_id, route, refusal)
            return
        try:
            message = route.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._send(peer, call_id, route, RemoteError(wire.BAD_REQUEST, f"The payload of {route.name}: {error}"))
            return
        self._send_or_defer(peer, call_id, route, message)

    def _too_many_wait(self, peer: Peer) -> bool:
        own = peer.deferred >= self._limits.deferred_calls_per_connection
        return own or len(self._deferred) >= self._limits.deferred_calls

    def _send_or_defer(self, peer: Peer, call_id: bytes, route: _Route, message: msgspec.Struct) -> None:
        result: Answer | Deferred
        self.caller = peer.client
        arrived = self._clock.monotonic()
        try:
            result = route.handler(message)
        except RemoteError as refusal:
            result = refusal
        except Exception as error:  # root of a request
            log.exception("Handling %s failed", route.name)
            result = RemoteError(wire.INTERNAL, f"The server failed to handle {route.name} ({type(error).__name__}).")
        if not isinstance(result, Deferred):
            self._send(peer, call_id, route, result)
            self._time_call(route, arrived)
            return
        assert route.may_defer, route.name
        key = next(self._deferred_order)
        self._deferred[key] = result
        peer.deferred += 1

        def settle(answer: Answer) -> None:
            if self._deferred.pop(key, None) is not None:
                peer.deferred -= 1
                self._send(peer, call_id, route, answer)
                self._time_call(route, arrived)

        def deliver(answer: Answer) -> None:
            if threading.current_thread() is self._thread:
                settle(answer)
            else:
                self.post(lambda: settle(answer))

        result.bind(deliver)

    def _send(self, peer: Peer, call_id: bytes, route: _Route, answer: Answer) -> None:
        if isinstance(answer, RemoteError):
            self._refuse(peer, call_id, answer.code, str(answer))
            self._count_call(route, answer.code)
            return
        self.peers.answer(
            peer, call_id, wire.STATUS_OK, answer if isinstance(answer, Bulk) else wire.encode_payload(answer)
        )
        self._count_call(route, "ok")

    def _refuse(self, peer: Peer, call_id: bytes, code: str, sentence: str) -> None:
        if code in (wire.BAD_REQUEST, wire.UNKNOWN_METHOD, wire.INTERNAL, wire.TOO_MANY):
            self._trouble(code, sentence)
        self.peers.answer(peer, call_id, code.encode(), wire.encode_sentence(sentence))

    def _trouble(self, kind: str, sentence: str) -> None:
        """Counts and, now and then, logs what a peer did wrong."""
        self._count_protocol_error(kind)
        if self._log_limiter.due(kind):
            log.warning(
                "Protocol error (%s): %s (more of this kind stay unlogged for %.0f s)", kind, sentence, _QUIET_SECONDS
            )

    def _count_protocol_error(self, code: str) -> None:
        if self._metrics is not None:
            self._metrics.protocol_errors.labels(code).inc()

    def _time_call(self, route: _Route, arrived: float) -> None:
        if self._metrics is None:
            return
        if route.seconds is None:
            route.seconds = self._metrics.call.labels(route.name)
        route.seconds.observe(self._clock.monotonic() - arrived)

    def _count_call(self, route: _Route, status: str) -> None:
        if self._metrics is None:
            return
        child = route.calls.get(status)
        if child is None:
            child = route.calls[status] = self._metrics.calls.labels(route.name, status)
        child.inc()

    def _close(self) -> None:
        for deferred in list(self._deferred.values()):
            deferred.answer(RemoteError(wire.SHUTTING_DOWN, "The server is shutting down."))
        while self._posted:  # with answers that other threads have given
            self._guarded(self._posted.popleft())
        self.peers.close(_LINGER_SECONDS)


def _end_waits_in_time() -> None:
    """By default the kernel may let a thread wait 50 us longer than it asked for. The wait for the interpreter is one
    of these waits, and the switch interval of a server is shorter."""
    with contextlib.suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NANOSECONDS, 0, 0, 0)
