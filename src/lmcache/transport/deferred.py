"""What a handler answers, at once or later."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from lmcache.errors import RemoteError


class Bulk:
    """A large answer that is sent from where it lies, encoded already. It must not change until it is `sent`."""

    def __init__(self, payload: bytearray) -> None:
        self.size_bytes = len(payload)
        self.payload = payload
        self.sent = False  # it is in the network's hands or copied, or the peer has gone


Answer = msgspec.Struct | Bulk | RemoteError


class Deferred:
    """An answer that comes later. `answer` may be called from any thread; the first answer counts."""

    __slots__ = ("_answer", "_deliver", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answer: Answer | None = None
        self._deliver: Callable[[Answer], None] | None = None

    def answer(self, answer: Answer) -> bool:
        """False if there was an answer already."""
        with self._lock:
            if self._answer is not None:
                return False
            self._answer = answer
            deliver = self._deliver
        if deliver is not None:
            deliver(answer)
        return True

    def bind(self, deliver: Callable[[Answer], None]) -> None:
        """For the message loop: where the answer goes."""
        with self._lock:
            self._deliver = deliver
            answer = self._answer
        if answer is not None:
            deliver(answer)
