"""Releases and ends of sessions: sent at once, never waited for, and sent again until the server has confirmed them.

What is not released stays leased until this engine ends, so a message that was sent while the server was away
has to be repeated. All of them are idempotent.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache.client.engine_environment import EngineEnvironment
from lmcache.core.limits import MAX_UNCONFIRMED_MESSAGES
from lmcache.errors import LMCacheError, ServerUnavailable
from lmcache.protocol.messages import Empty, EndSession, HelloReply, Release
from lmcache.telemetry.log_limiter import LogLimiter

if TYPE_CHECKING:
    from lmcache.client.client import Client
    from lmcache.transport.connection import Pending

log = logging.getLogger("lmcache.client")

OutboxMessage = Release | EndSession

_ANSWER_SECONDS = 5.0
_RETRY_SECONDS = 1.0
# A call that was not answered may still lie in the server's socket when the message that ends it arrives on another
# connection. So the message is sent once more, late enough to come after it.
_RESEND_SECONDS = 10.0
_LOG_SECONDS = 60.0  # between two lines of faults of the same kind of message: there may be thousands


@dataclass
class _Unconfirmed:
    hello: HelloReply  # the server that it is for; the next one knows nothing of it
    method: str
    message: OutboxMessage
    pending: Pending[Empty] | None
    resend_at: float | None


class ReleaseOutbox:
    """`send` is for one thread. A thread of the outbox retries what is not confirmed, and waits while all is."""

    def __init__(self, client: Client, environment: EngineEnvironment) -> None:
        self._client = client
        self._environment = environment
        self._clock = environment.clock
        self._log_limiter = LogLimiter(_LOG_SECONDS, environment.clock)
        self._changed = environment.condition()
        self._unconfirmed: list[_Unconfirmed] = []
        self._closing = False
        self._thread: threading.Thread | None = None

    def send(self, method: str, message: OutboxMessage, *, twice: bool = False) -> None:
        """`twice`: an unanswered call that this message ends may still be on its way."""
        hello = self._client.hello
        if hello is None:
            return
        resend_at = self._clock.monotonic() + _RESEND_SECONDS if twice else None
        entry = _Unconfirmed(hello, method, message, self._submit(method, message), resend_at)
        with self._changed:
            if len(self._unconfirmed) >= MAX_UNCONFIRMED_MESSAGES:
                log.warning(
                    "%d notices to the LMCache server are unconfirmed: the oldest is dropped", len(self._unconfirmed)
                )
                del self._unconfirmed[0]
            self._unconfirmed.append(entry)
            if self._thread is None:
                self._thread = self._environment.thread(target=self._run, name="lmcache-outbox", daemon=True)
                self._thread.start()
            elif len(self._unconfirmed) == 1:
                self._changed.notify()

    def retry(self) -> int:
        """Drops what is confirmed, sends again what was lost; how many messages are still unconfirmed."""
        with self._changed:
            entries, self._unconfirmed = self._unconfirmed, []
        unconfirmed: list[_Unconfirmed] = []
        for entry in entries:
            try:
                if self._is_unconfirmed(entry):
                    unconfirmed.append(entry)
            except Exception:  # of one message: the others go on, and it is sent again
                if self._log_limiter.due(entry.method):
                    log.exception("%s was not sent to the LMCache server; it is sent again", entry.method)
                entry.pending = None
                unconfirmed.append(entry)
        with self._changed:
            self._unconfirmed = unconfirmed + self._unconfirmed
            return len(self._unconfirmed)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()

    def _is_unconfirmed(self, entry: _Unconfirmed) -> bool:
        if entry.hello is not self._client.hello:
            return False
        if entry.pending is not None:
            if not entry.pending.done():
                return True
            try:
                entry.pending.result()
            except ServerUnavailable:
                entry.pending = None
            except LMCacheError as error:
                log.debug("%s was refused: %s", entry.method, error)
        if entry.pending is not None:  # confirmed
            if entry.resend_at is None:
                return False
            if self._clock.monotonic() < entry.resend_at:
                return True
            entry.resend_at = None
        entry.pending = self._submit(entry.method, entry.message)
        return True

    def _submit(self, method: str, message: OutboxMessage) -> Pending[Empty] | None:
        try:
            return self._client.submit(method, message, _ANSWER_SECONDS)
        except LMCacheError:
            return None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unconfirmed or self._closing)
                self._changed.wait_for(lambda: self._closing, _RETRY_SECONDS)
                if self._closing:
                    return
            try:
                self.retry()
            except Exception:
                log.exception("Notices to the LMCache server failed")
