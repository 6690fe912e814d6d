"""The server's message loop: one thread, one ROUTER socket.

Invariants: a call whose call id can be read gets exactly one answer; nothing that a peer sends ends the loop; no
handler waits. What takes long returns a `Deferred` and answers it later from any thread.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import zmq

from lmcache.core import limits
from lmcache.errors import RemoteError, ResourceError
from lmcache.telemetry.metrics import Metrics
from lmcache.transport import wire
from lmcache.transport.address import bind_endpoint
from lmcache.transport.bulk import Bulk
from lmcache.transport.deferred import Answer, Deferred
from lmcache.transport.timers import Timer, Timers

log = logging.getLogger("lmcache.transport")

_BURST_MESSAGES = 64  # then timers and posted work get their turn
_HANDSHAKE_SECONDS = 10
_LINGER_SECONDS = 0.5
_FAULT_PAUSE_SECONDS = 0.05
_QUIET_SECONDS = 10.0  # at most one log line per kind of protocol error in that time


Handler = Callable[[Any], "msgspec.Struct | Deferred"]


@dataclass(frozen=True)
class Method:
    """How one method is decoded and handled. Handlers run on the loop; a RemoteError they raise is the answer."""

    request: type[msgspec.Struct]
    handler: Handler


@dataclass(frozen=True)
class RpcLimits:
    message_bytes: int = limits.MAX_MESSAGE_BYTES
    queued_messages_per_client: int = limits.MAX_CALLS_IN_FLIGHT_PER_CLIENT
    deferred_calls: int = limits.MAX_DEFERRED_CALLS


class _Route:
    __slots__ = ("calls", "decode", "handler", "name")

    def __init__(self, name: str, method: Method) -> None:
        self.name = name
        self.decode = wire.decoder_of(method.request).decode
        self.handler = method.handler
        self.calls: dict[str, Any] = {}  # status -> metric child


def refuse_unusable(host: str, port: int) -> None:
    """ResourceError where no port of the host can be listened on. Whether `port` is free is seen when it is taken."""
    endpoint = bind_endpoint(host, 0)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            router.bind(endpoint)
        except zmq.ZMQError as error:
            raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: zmq.ZMQError) -> ResourceError:
    reason = "it is in use" if error.errno == zmq.EADDRINUSE else str(error)
    return ResourceError(f"Cannot listen on {host}:{port} because {reason}; choose another --port or --host.")


class RpcServer:
    """Binds at construction (ResourceError when it cannot), serves from `start` to `stop`."""

    def __init__(
        self,
        bind_host: str,
        port: int,
        metrics: Metrics | None = None,
        rpc_limits: RpcLimits | None = None,
    ) -> None:
        self._limits = rpc_limits or RpcLimits()
        self._metrics = metrics
        self._routes: dict[bytes, _Route] = {}
        self._posted: deque[Callable[[], None]] = deque()
        self._timers = Timers()
        self._deferred: dict[tuple[bytes, bytes, int], Deferred] = {}
        self._deferred_order = itertools.count()
        self._quiet_until: dict[str, float] = {}
        self._stopping = False
        self._draining = False
        self._thread = threading.Thread(target=self._run, name="lmcache-rpc", daemon=True)
        self._context = zmq.Context(io_threads=1)
        self._router = self._bind(bind_endpoint(bind_host, port), bind_host, port)
        self.endpoint = cast(bytes, self._router.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Open as long as anybody can post: the number could soon be that of somebody else's file.
        weakref.finalize(self, os.close, self._wake_fd).atexit = False  # type: ignore[misc]

    def _bind(self, endpoint: str, host: str, port: int) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.MAXMSGSIZE, self._limits.message_bytes)
        router.setsockopt(zmq.RCVHWM, self._limits.queued_messages_per_client)
        router.setsockopt(zmq.SNDHWM, self._limits.queued_messages_per_client)
        router.setsockopt(zmq.LINGER, int(_LINGER_SECONDS * 1000))
        router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_SECONDS * 1000)
        router.setsockopt(zmq.TCP_KEEPALIVE, 1)
        router.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)
        router.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            router.bind(endpoint)
        except zmq.ZMQError as error:
            router.close(0)
            self._context.term()
            raise _cannot_listen(host, port, error) from error
        return router

    # ---- any thread --------------------------------------------------------------------------------------------------
    def start(self, methods: Mapping[str, Method]) -> None:
        self._routes = {name.encode(): _Route(name, method) for name, method in methods.items()}
        self._thread.start()

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
        if self._thread.is_alive():
            self.post(lambda: None)
            self._thread.join(timeout_seconds)
        elif not self._router.closed:  # never started
            self._close()

    # ---- loop thread -------------------------------------------------------------------------------------------------
    def call_later(self, delay_seconds: float, action: Callable[[], None]) -> Timer:
        """On the loop thread, or before `start`."""
        return self._timers.add(delay_seconds, action)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(cast(int, self._router.getsockopt(zmq.FD)), select.POLLIN)
        poller.register(self._wake_fd, select.POLLIN)
        try:
            while not self._stopping:
                try:
                    self._turn(poller)
                except Exception:
                    log.exception("The message loop met a fault and goes on")
                    self._count_protocol_error(wire.INTERNAL)
                    time.sleep(_FAULT_PAUSE_SECONDS)  # a fault that stays must not take the whole processor
        finally:
            self._close()

    def _turn(self, poller: select.poll) -> None:
        more_to_receive = self._receive_burst()
        worked = bool(self._posted)
        for _ in range(len(self._posted)):
            self._guarded(self._posted.popleft())
        wait_ms, timers_ran = self._timers.run_due(self._guarded)
        # The descriptor only tells what changed since the socket was last touched, so waiting is right only when the
        # last thing done to it was a look that found nothing.
        if more_to_receive or worked or timers_ran or self._stopping:
            return
        for fd, _ in poller.poll(wait_ms):
            if fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)

    def _receive_burst(self) -> bool:
        """Whether there may be more."""
        for _ in range(_BURST_MESSAGES):
            if not cast(int, self._router.getsockopt(zmq.EVENTS)) & wire.READABLE:
                return False
            self._receive()
        return True

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            log.exception("Work on the message loop failed")

    def _receive(self) -> None:
        """One message. Every frame of it is there; none is copied before it is known to be wanted."""
        router = self._router
        frame = router.recv(zmq.NOBLOCK, copy=False)
        peer = frame.bytes
        frames: list[zmq.Frame] = []
        surplus = False
        while frame.more:
            frame = router.recv(zmq.NOBLOCK, copy=False)
            if len(frames) < wire.CALL_FRAMES:
                frames.append(frame)
            else:  # not kept: a message may have any number of frames
                surplus = True
        if surplus or len(frames) != wire.CALL_FRAMES or len(frames[0]) != wire.CALL_ID_BYTES:
            self._drop(f"not {wire.CALL_FRAMES} frames, or a call id that is not {wire.CALL_ID_BYTES} bytes")
            return
        call_id, method, payload = frames[0].bytes, frames[1].bytes, frames[2]
        route = self._routes.get(method) if len(method) <= wire.MAX_METHOD_BYTES else None
        if route is None:
            self._refuse(peer, call_id, wire.UNKNOWN_METHOD, f"There is no method {method[:64]!r}.")
            return
        if self._draining and route.name != "ping":
            self._send(peer, call_id, route, RemoteError(wire.SHUTTING_DOWN, "The server is shutting down."))
            return
        try:
            request = route.decode(payload.buffer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._send(peer, call_id, route, RemoteError(wire.BAD_REQUEST, f"The payload of {route.name}: {error}"))
            return
        self._send_or_defer(peer, call_id, route, request)

    def _send_or_defer(self, peer: bytes, call_id: bytes, route: _Route, request: msgspec.Struct) -> None:
        result: Answer | Deferred
        try:
            result = route.handler(request)
        except RemoteError as refusal:
            result = refusal
        except Exception as error:  # root of a request
            log.exception("Handling %s failed", route.name)
            result = RemoteError(wire.INTERNAL, f"The server failed to handle {route.name} ({type(error).__name__}).")
        if not isinstance(result, Deferred):
            self._send(peer, call_id, route, result)
            return
        if len(self._deferred) >= self._limits.deferred_calls and not result.answered:
            result.answer(RemoteError(wire.TOO_MANY, "Too many calls wait for an answer; try again later."))
        key = (peer, call_id, next(self._deferred_order))
        self._deferred[key] = result

        def deliver(answer: Answer) -> None:
            if threading.current_thread() is self._thread:
                self._settle(key, route, answer)
            else:
                self.post(lambda: self._settle(key, route, answer))

        result.bind(deliver)

    def _settle(self, key: tuple[bytes, bytes, int], route: _Route, answer: Answer) -> None:
        if self._deferred.pop(key, None) is not None:
            self._send(key[0], key[1], route, answer)

    def _send(self, peer: bytes, call_id: bytes, route: _Route, answer: Answer) -> None:
        if isinstance(answer, RemoteError):
            self._refuse(peer, call_id, answer.code, str(answer))
            self._count_call(route, answer.code)
            return
        payload = answer.frame() if isinstance(answer, Bulk) else wire.encode_payload(answer)
        self._send_frames(peer, call_id, wire.STATUS_OK, payload)
        self._count_call(route, "ok")

    def _refuse(self, peer: bytes, call_id: bytes, code: str, sentence: str) -> None:
        if code in (wire.BAD_REQUEST, wire.UNKNOWN_METHOD, wire.INTERNAL, wire.TOO_MANY):
            self._count_protocol_error(code)
            self._say(code, sentence)
        self._send_frames(peer, call_id, code.encode(), wire.encode_sentence(sentence))

    def _send_frames(self, peer: bytes, call_id: bytes, status: bytes, payload: bytes | zmq.Frame) -> None:
        send = self._router.send
        try:
            # A peer that has gone or does not read is dropped by ZMQ here: its call has nobody left to answer.
            send(peer, wire.MORE)
            send(call_id, wire.MORE)
            send(status, wire.MORE)
            send(payload, zmq.NOBLOCK, copy=not isinstance(payload, zmq.Frame))
        except zmq.ZMQError as error:
            self._count_protocol_error("unreachable")
            self._say("unreachable", f"an answer could not be sent: {error}")

    def _drop(self, reason: str) -> None:
        self._count_protocol_error("dropped")
        self._say("dropped", reason)

    def _say(self, kind: str, sentence: str) -> None:
        now = time.monotonic()
        if now >= self._quiet_until.get(kind, 0.0):
            self._quiet_until[kind] = now + _QUIET_SECONDS
            log.warning(
                "Protocol error (%s): %s (more of this kind stay unlogged for %.0f s)", kind, sentence, _QUIET_SECONDS
            )

    def _count_protocol_error(self, code: str) -> None:
        if self._metrics is not None:
            self._metrics.protocol_errors.labels(code).inc()

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
        self._router.close()
        self._context.term()
