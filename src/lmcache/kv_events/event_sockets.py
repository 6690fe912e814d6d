"""The two sockets of KV events: PUB, which never waits for a subscriber, and ROUTER, which repeats what one missed.

Invariant: what subscribers do not read takes at most MAX_KV_EVENTS_WAITING batches each, and the batches that are kept
to be repeated at most MAX_KV_EVENTS_KEPT_BYTES. Beyond either the oldest or the newest are dropped, and numbers tell.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.errors import ResourceError
from lmcache.kv_events.endpoint import Endpoint
from lmcache.kv_events.wire import END_OF_REPLAY, SEQUENCE_BYTES, AllBlocksCleared, Event, EventBatch

logger = logging.getLogger("lmcache.kv_events")

_SENDING_THREADS = 1
_MAX_REQUEST_BYTES = 4096


class EventSockets:
    """Bound at construction: ResourceError. Then used by one thread, which also closes them. Every topic has numbers of
    its own, from the microsecond on in which it began: who knows those of an earlier server misses what is between. Of
    more than MAX_KV_EVENT_TOPICS the one that was silent longest ends with AllBlocksCleared."""

    def __init__(self, endpoint: Endpoint, replay: Endpoint | None, clock: Clock) -> None:
        self._clock = clock
        self._context = zmq.Context(_SENDING_THREADS)
        self._numbers: dict[str, int] = {}
        self._kept: deque[tuple[bytes, int, bytes]] = deque()  # topic, number, batch
        self._kept_bytes = 0
        try:
            self._publisher = self._opened(zmq.PUB, endpoint, limits.MAX_KV_EVENTS_WAITING, "--kv-events-endpoint")
            self._router = (
                self._opened(zmq.ROUTER, replay, limits.MAX_KV_EVENTS_KEPT + 1, "--kv-events-replay-endpoint")
                if replay is not None
                else None
            )
        except BaseException:
            self.close()
            raise

    def _opened(self, kind: zmq.SocketType, endpoint: Endpoint, most_waiting: int, flag: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, most_waiting)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)  # of what comes: anybody may connect
        socket.setsockopt(zmq.IPV6, int("[" in endpoint.address))
        try:
            (socket.bind if endpoint.binds else socket.connect)(endpoint.address)
        except zmq.ZMQError as error:
            raise ResourceError(
                f"{flag} {endpoint.address} cannot be used: {error.strerror}; give another port or path."
            ) from None
        return socket

    @property
    def topics(self) -> list[str]:
        return list(self._numbers)

    def publish(self, topic: str, events: Sequence[Event]) -> None:
        number = self._numbers.pop(topic, None)
        if number is None:
            number = int(self._clock.wall() * 1_000_000)
        if len(self._numbers) >= limits.MAX_KV_EVENT_TOPICS:
            ended = next(iter(self._numbers))
            self.publish(ended, [AllBlocksCleared()])
            del self._numbers[ended]
        self._numbers[topic] = number + 1
        name, content = topic.encode(), msgspec.msgpack.encode(EventBatch(self._clock.wall(), events))
        self._publisher.send_multipart((name, _packed(number), content), copy=False)
        if self._router is None:
            return
        self._kept.append((name, number, content))
        self._kept_bytes += len(content)
        while len(self._kept) > limits.MAX_KV_EVENTS_KEPT or self._kept_bytes > limits.MAX_KV_EVENTS_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[2])

    def repeat(self, wait_seconds: float) -> bool:
        """Answers one request for what was missed, if one comes within that time. False: there is no such socket."""
        if self._router is None:
            return False
        if not self._router.poll(round(wait_seconds * 1000)):
            return True
        frames = self._router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != SEQUENCE_BYTES:
            logger.warning("A request for KV events was not understood: it is an empty frame and 8 bytes")
            return True
        client, first = frames[0], int.from_bytes(frames[2], "big")
        for topic, number, content in self._kept:
            if number >= first:
                self._router.send_multipart((client, b"", topic, _packed(number), content), copy=False)
        self._router.send_multipart((client, b"", b"", END_OF_REPLAY, b""))
        return True

    def close(self) -> None:
        """Idempotent. Not while another thread uses them."""
        self._context.destroy(linger=0)


def _packed(number: int) -> bytes:
    return number.to_bytes(SEQUENCE_BYTES, "big")
