"""Releases and ends of sessions: sent at once, never waited for, and sent again until the server has confirmed them.

What is not given back stays leased for as long as this engine lives, so a notice that fell into a time when the server
was away has to be repeated. All of them are idempotent.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache.clock import Clock
from lmcache.core.limits import MAX_NOTICES_OWED
from lmcache.errors import LMCacheError, ServerUnavailable
from lmcache.protocol.messages import Empty, EndSession, HelloReply, Release

if TYPE_CHECKING:
    from lmcache.client.client import Client
    from lmcache.transport.client import Pending

log = logging.getLogger("lmcache.vllm")

Notice = Release | EndSession

_ANSWER_SECONDS = 5.0
_LOOK_SECONDS = 1.0  # how often unconfirmed notices are looked at
# A call that was not answered may still lie in the server's socket when the notice that ends it arrives on another
# connection. So the notice is sent once more, late enough to come after it.
_AFTERTHOUGHT_SECONDS = 10.0


@dataclass
class _Owed:
    hello: HelloReply  # the server life that it is for; the next one knows nothing of it
    method: str
    message: Notice
    pending: Pending[Empty] | None
    again_at: float | None


class Notices:
    """`send` may be called from one thread; a thread of its own, asleep while nothing is owed, does the rest."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._changed = threading.Condition()
        self._owed: list[_Owed] = []
        self._closing = False
        self._thread: threading.Thread | None = None

    def send(self, method: str, message: Notice, *, twice: bool = False) -> None:
        """`twice`: an unanswered call that this notice settles may still be on its way."""
        hello = self._client.hello
        if hello is None:
            return
        again_at = self._clock.monotonic() + _AFTERTHOUGHT_SECONDS if twice else None
        owed = _Owed(hello, method, message, self._submit(method, message), again_at)
        with self._changed:
            if len(self._owed) >= MAX_NOTICES_OWED:
                log.warning("%d notices to the LMCache server are unconfirmed: the oldest is dropped", len(self._owed))
                del self._owed[0]
            self._owed.append(owed)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lmcache-notices", daemon=True)
                self._thread.start()
            elif len(self._owed) == 1:
                self._changed.notify()

    def look(self) -> int:
        """Drops what is confirmed, sends again what was lost; how many are still owed."""
        with self._changed:
            owed, self._owed = self._owed, []
        still = [one for one in owed if self._is_owed(one)]
        with self._changed:
            self._owed = still + self._owed
            return len(self._owed)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()

    def _is_owed(self, owed: _Owed) -> bool:
        if owed.hello is not self._client.hello:
            return False
        if owed.pending is not None:
            if not owed.pending.done():
                return True
            try:
                owed.pending.result()
            except ServerUnavailable:
                owed.pending = None
            except LMCacheError as error:
                log.debug("%s was refused: %s", owed.method, error)
        if owed.pending is not None:  # confirmed
            if owed.again_at is None:
                return False
            if self._clock.monotonic() < owed.again_at:
                return True
            owed.again_at = None
        owed.pending = self._submit(owed.method, owed.message)
        return True

    def _submit(self, method: str, message: Notice) -> Pending[Empty] | None:
        try:
            return self._client.submit(method, message, _ANSWER_SECONDS)
        except LMCacheError:
            return None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._owed or self._closing)
                self._changed.wait_for(lambda: self._closing, _LOOK_SECONDS)
                if self._closing:
                    return
            try:
                self.look()
            except Exception:
                log.exception("Notices to the LMCache server failed")
