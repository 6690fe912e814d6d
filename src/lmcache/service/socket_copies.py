"""Copies between messages and L1, on a thread beside the message loop, and the payload that they keep in memory.

Everything but the copies themselves and `buffer` runs on the message loop.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from lmcache.core import limits
from lmcache.errors import RemoteError
from lmcache.protocol.messages import ErrorCode
from lmcache.transport.deferred import Answer, Bulk, Deferred
from lmcache.transport.rpc_server import RpcServer

log = logging.getLogger("lmcache.service")

_SPARE_SECONDS = 1.0


@dataclass
class _Traffic:
    """What the server holds for one owner."""

    copies: int = 0
    copying_bytes: int = 0
    unsent: deque[Bulk] = field(default_factory=deque)

    @property
    def size_bytes(self) -> int:
        return self.copying_bytes + sum(bulk.size_bytes for bulk in self.unsent)


class SocketCopies:
    """Invariant: payload on its way takes at most MAX_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES_PER_WORKER for one worker."""

    def __init__(self, loop: RpcServer, thread: Executor) -> None:
        """`thread` must run what it is given in order, one after the other. Closing it is the caller's business."""
        self._loop = loop
        self._thread = thread
        self._traffic: dict[int, _Traffic] = {}  # by owner
        # Payloads of answers, filled again when they have been sent: fresh memory costs more than the copy into it.
        self._spare: deque[bytearray] = deque()
        self._taken = 0
        self._taken_before = 0
        self._checking_spare = False

    def is_copying(self, owner: int) -> bool:
        """Whether a copy for that owner is under way."""
        traffic = self._traffic.get(owner)
        return traffic is not None and traffic.copies > 0

    def submit(
        self,
        owner: int,
        size_bytes: int,
        copy: Callable[[], Answer],
        ended: Callable[[Answer], None] = lambda answer: None,
    ) -> Deferred:
        """Runs `copy` on the thread, then answers and calls `ended` on the loop. RemoteError when too much is on its
        way. The payload of a Bulk that `copy` returns must come from `buffer`."""
        traffic = self._with_room(owner, size_bytes)
        deferred = Deferred()

        def finish(answer: Answer) -> None:
            traffic.copies -= 1
            traffic.copying_bytes -= size_bytes
            delivered = deferred.answer(answer)
            if isinstance(answer, Bulk) and delivered:  # else it was refused meanwhile, and is never sent
                traffic.unsent.append(answer)
                self._check_spare_later()
            ended(answer)

        def run() -> None:
            try:
                answer = copy()
            except Exception:  # the root of one copy
                log.exception("A copy between the socket and L1 failed")
                answer = RemoteError(ErrorCode.INTERNAL, "The copy failed; see the server's log.")
            self._loop.post(lambda: finish(answer))

        try:
            self._thread.submit(run)
        except RuntimeError as error:
            raise RemoteError(ErrorCode.SHUTTING_DOWN, "The server is shutting down.") from error
        traffic.copies += 1
        traffic.copying_bytes += size_bytes
        return deferred

    def buffer(self, size_bytes: int) -> bytearray:
        """Memory for the payload of an answer. Called by copies."""
        self._taken += 1
        try:
            spare = self._spare.pop()
        except IndexError:
            return bytearray(size_bytes)
        return spare if len(spare) == size_bytes else bytearray(size_bytes)

    def _with_room(self, owner: int, size_bytes: int) -> _Traffic:
        traffic = self._traffic.get(owner)
        if traffic is None:
            self._collect_sent()
            self._traffic = {
                owner: traffic for owner, traffic in self._traffic.items() if traffic.size_bytes or traffic.copies
            }
            traffic = self._traffic[owner] = _Traffic()
        self._collect(traffic)
        if traffic.size_bytes + size_bytes > limits.MAX_PAYLOAD_BYTES_PER_WORKER:
            raise RemoteError(ErrorCode.TOO_MANY, "Too much payload of this worker is on its way; take some first.")
        if sum(other.size_bytes for other in self._traffic.values()) + size_bytes > limits.MAX_PAYLOAD_BYTES:
            raise RemoteError(ErrorCode.TOO_MANY, "Too much payload of all workers is on its way; try again later.")
        return traffic

    # ---- memory that was sent ----------------------------------------------------------------------------------------
    def _collect_sent(self) -> bool:
        """Whether everything has been sent."""
        all_sent = [self._collect(traffic) for traffic in self._traffic.values()]
        return all(all_sent)

    def _collect(self, traffic: _Traffic) -> bool:
        while traffic.unsent and traffic.unsent[0].sent:
            payload = traffic.unsent.popleft().payload
            if len(self._spare) * limits.MAX_PAYLOAD_PART_BYTES < limits.PAYLOAD_WINDOW_BYTES:
                self._spare.append(payload)
        return not traffic.unsent

    def _check_spare_later(self) -> None:
        """Lets all spare memory go once nothing was taken for a while and nothing is unsent."""
        if not self._checking_spare:
            self._checking_spare = True
            self._loop.call_later(_SPARE_SECONDS, self._check_spare)

    def _check_spare(self) -> None:
        self._checking_spare = False
        if not self._collect_sent() or self._taken != self._taken_before:
            self._taken_before = self._taken
            self._check_spare_later()
        else:
            self._spare.clear()
