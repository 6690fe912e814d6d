"""Whether the server answers at all, asked beside a call that is taking its time and never waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache.clock import Clock
from lmcache.errors import LMCacheError, RemoteError
from lmcache.protocol.messages import Empty

if TYPE_CHECKING:
    from lmcache.client.client import Client
    from lmcache.transport.client import Pending

QUIET_SECONDS = 0.25  # a call older than this makes us ask
ANSWER_SECONDS = 1.5  # what the message loop gets to answer a call that does nothing
# Two looks for the answer count as no more than that: an engine that did not run in between, or was inside a long step,
# has not given the server, or its own socket's thread, the time that passed.
LONGEST_LOOK_SECONDS = 0.5
# Looks further apart than this show that the engine stood still, and what stood still here (a machine, a container
# without processor time) may have stood still there: such a wait is begun once more before the server is given up.
STAND_STILL_SECONDS = 0.2
_SILENT_SECONDS = 60.0


class Pulse:
    """For one thread. A lookup may rightly take seconds (L2); a server that answers no no-op is stuck or gone."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._probe: Pending[Empty] | None = None
        self._looked_at = 0.0
        self._waited_seconds = 0.0  # for the probe's answer
        self._stood_still = self._waited_again = False  # meanwhile
        self._heard_at = float("-inf")
        self._silent = False

    @property
    def silent(self) -> bool:
        """The last question is unanswered past its time: ask this server for nothing until it is answered."""
        if self._silent:
            self._listen()
        return self._silent

    def heard(self) -> None:
        """Some call was answered."""
        self._heard_at = self._clock.monotonic()

    def check(self, since: float) -> bool:
        """For a call sent at `since` and not yet answered: False when it should be given up."""
        now = self._clock.monotonic()
        if now - max(since, self._heard_at) < QUIET_SECONDS:
            return True
        if self._probe is None:
            try:
                self._probe = self._client.submit("noop", Empty(), _SILENT_SECONDS)
                self._looked_at, self._waited_seconds = now, 0.0
                self._stood_still = self._waited_again = False
            except LMCacheError:
                return False
        self._listen()
        self._stood_still |= now - self._looked_at > STAND_STILL_SECONDS
        self._waited_seconds += min(now - self._looked_at, LONGEST_LOOK_SECONDS)
        self._looked_at = now
        if self._probe is not None and self._waited_seconds >= ANSWER_SECONDS:
            if self._stood_still and not self._waited_again:
                self._waited_seconds, self._waited_again = 0.0, True
            else:
                self._silent = True
        return not self._silent

    def _listen(self) -> None:
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
