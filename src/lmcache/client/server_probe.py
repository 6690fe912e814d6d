"""Whether the server answers at all: a no-op beside a call that takes long, never waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache.clock import Clock
from lmcache.errors import LMCacheError, RemoteError
from lmcache.protocol.messages import Empty

if TYPE_CHECKING:
    from lmcache.client.client import Client
    from lmcache.transport.connection import Pending

QUIET_SECONDS = 0.25  # a call older than this makes the probe send its no-op
ANSWER_SECONDS = 1.5  # what the message loop gets to answer a call that does nothing
# The time between two checks counts as no more than that: an engine that did not run in between, or was inside a long
# step, has not given the server, or its own socket's thread, the time that passed.
LONGEST_LOOK_SECONDS = 0.5
# Checks further apart than this show that the engine stood still. What stopped it (a machine, a container without
# processor time) may have stopped the server too, so such a wait begins once more before the server is given up.
STAND_STILL_SECONDS = 0.2
_SILENT_SECONDS = 60.0


class ServerProbe:
    """For one thread. A lookup may take seconds (L2); a server that does not answer a no-op is stuck or gone."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._probe: Pending[Empty] | None = None
        self._checked_at = 0.0
        self._waited_seconds = 0.0  # for the probe's answer
        self._stood_still = self._waited_again = False  # meanwhile
        self._heard_at = float("-inf")
        self._silent = False

    @property
    def silent(self) -> bool:
        """The last no-op is unanswered past its time: nothing is asked of this server until it is answered."""
        if self._silent:
            self._take_answer()
        return self._silent

    def heard(self) -> None:
        """To be called when any call was answered."""
        self._heard_at = self._clock.monotonic()

    def check(self, since: float) -> bool:
        """For a call sent at `since` and not yet answered: False when it should be given up."""
        checked_at = self._clock.monotonic()
        if checked_at - max(since, self._heard_at) < QUIET_SECONDS:
            return True
        if self._probe is None:
            try:
                self._probe = self._client.submit("noop", Empty(), _SILENT_SECONDS)
                self._checked_at, self._waited_seconds = checked_at, 0.0
                self._stood_still = self._waited_again = False
            except LMCacheError:
                return False
        self._take_answer()
        self._stood_still |= checked_at - self._checked_at > STAND_STILL_SECONDS
        self._waited_seconds += min(checked_at - self._checked_at, LONGEST_LOOK_SECONDS)
        self._checked_at = checked_at
        if self._probe is not None and self._waited_seconds >= ANSWER_SECONDS:
            if self._stood_still and not self._waited_again:
                self._waited_seconds, self._waited_again = 0.0, True
            else:
                self._silent = True
        return not self._silent

    def _take_answer(self) -> None:
        if self._probe is None or not self._probe.done():
            return
        try:
            self._probe.result()
            self.heard()
        except RemoteError:
            self.heard()
        except LMCacheError:
            pass  # the connection is gone; the client says so itself from here on
        self._probe = None
        self._silent = False
