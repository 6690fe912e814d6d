"""Frames over the socket, in parts: bounded messages, a bounded number of bytes on their way."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache import _native
from lmcache.core.limits import MAX_PAYLOAD_PART_BYTES, PAYLOAD_WINDOW_BYTES
from lmcache.errors import LMCacheError, RemoteError, ServerUnavailable
from lmcache.protocol.messages import Read, Write

if TYPE_CHECKING:
    from lmcache.client.client import Client
    from lmcache.transport.connection import Pending

log = logging.getLogger("lmcache.client")

PART_SECONDS = 10.0  # for the answer to one part, with a full window before it
_LOOK_SECONDS = 0.25  # how soon a transfer notices that it is to stop


class Frame(NamedTuple):
    """A frame of a reservation or a lease, and the memory of its size that it is sent from or fetched into."""

    group: int
    chunk: int
    memory: memoryview


class _Call(NamedTuple):
    pending: Pending[Any]
    frame: int
    offset: int
    size_bytes: int


class FrameMover:
    """One worker's transfers with one server epoch. Thread-safe; a transfer is its caller's.

    A frame that the server refuses fails alone; when the server cannot be reached the rest of the transfer fails.
    """

    def __init__(
        self, client: Client, server_epoch: bytes, instance_id: str, worker_id: int, stopping: Callable[[], bool]
    ) -> None:
        self._client = client
        self._server_epoch = server_epoch
        self._instance_id = instance_id
        self._worker_id = worker_id
        self._stopping = stopping

    def send(self, reservation: int, frames: Iterable[Frame]) -> list[bool]:
        """Whether the server has each frame whole in the slot of the reservation."""

        def submit(frame: Frame, offset: int, part: memoryview) -> Pending[Any]:
            message = Write(
                self._instance_id,
                self._worker_id,
                self._server_epoch,
                reservation,
                frame.group,
                frame.chunk,
                offset,
                part,
            )
            return self._client.submit("write", message, PART_SECONDS)

        def check(reply: Any, offset: int, part: memoryview) -> bool:
            return bool(reply.received_bytes == offset + len(part))

        return self._transfer(list(frames), submit, check)

    def fetch(self, lease: int, frames: Iterable[Frame]) -> list[bool]:
        """Whether each frame has come as the server has it. Nothing is verified here."""

        def submit(frame: Frame, offset: int, part: memoryview) -> Pending[Any]:
            message = Read(
                self._instance_id,
                self._worker_id,
                self._server_epoch,
                lease,
                frame.group,
                frame.chunk,
                offset,
                len(part),
            )
            return self._client.submit("read", message, PART_SECONDS)

        def take(reply: Any, offset: int, part: memoryview) -> bool:
            if len(reply.data) != len(part):
                return False
            _native.copy_plain(_native.buffer_address(part), _native.buffer_address(reply.data), len(part))
            return True

        return self._transfer(list(frames), submit, take)

    def _transfer(
        self,
        frames: list[Frame],
        submit: Callable[[Frame, int, memoryview], Pending[Any]],
        accept: Callable[[Any, int, memoryview], bool],
    ) -> list[bool]:
        good = [True] * len(frames)
        calls: deque[_Call] = deque()
        on_their_way_bytes = 0
        ended = 0  # frames before this one have all their answers

        def settle_oldest() -> None:
            nonlocal on_their_way_bytes, ended
            call = calls[0]
            try:
                reply = self._answer(call.pending)
                part = frames[call.frame].memory[call.offset : call.offset + call.size_bytes]
                if not accept(reply, call.offset, part):
                    good[call.frame] = False
            except RemoteError as refusal:
                log.debug("A frame could not be transferred: %s", refusal)
                good[call.frame] = False
            calls.popleft()
            on_their_way_bytes -= call.size_bytes
            ended = calls[0].frame if calls else call.frame + 1

        try:
            for number, offset, size_bytes in _parts(frames):
                while calls and on_their_way_bytes + size_bytes > PAYLOAD_WINDOW_BYTES:
                    settle_oldest()
                if not good[number]:
                    continue
                if self._stopping():
                    raise ServerUnavailable("the transfer was stopped")
                part = frames[number].memory[offset : offset + size_bytes]
                calls.append(_Call(submit(frames[number], offset, part), number, offset, size_bytes))
                on_their_way_bytes += size_bytes
            while calls:
                settle_oldest()
        except LMCacheError as error:
            log.debug("A transfer of %d frames ended after %d: %s", len(frames), ended, error)
            for call in calls:
                call.pending.cancel()
            good[ended:] = [False] * (len(frames) - ended)
        return good

    def _answer(self, pending: Pending[Any]) -> Any:
        while not pending.wait(_LOOK_SECONDS):
            if self._stopping():
                raise ServerUnavailable("the transfer was stopped")
        return pending.result()


def _parts(frames: list[Frame]) -> Iterator[tuple[int, int, int]]:
    """(frame, offset, bytes) of every message, in order."""
    for number, frame in enumerate(frames):
        for offset in range(0, len(frame.memory), MAX_PAYLOAD_PART_BYTES):
            yield number, offset, min(MAX_PAYLOAD_PART_BYTES, len(frame.memory) - offset)
