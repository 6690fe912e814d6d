"""Whether the machine stood still: a thread that notes when its own clock has jumped.

On a machine, or in a container, whose processors are all taken nothing may run for seconds, a server as little as
whoever waits for it. A test that judges a silence has to know.
"""

from __future__ import annotations

import threading
import time
from collections import deque

_TICK_SECONDS = 0.02
_KEPT = 1024
STAND_STILL_SECONDS = 0.2  # from which on a gap is noted


class StandStills:
    """Notes gaps from its construction to `close`."""

    def __init__(self) -> None:
        self.gaps: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # (end, seconds)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stand-stills", daemon=True)
        self._thread.start()

    def seconds_since(self, began: float) -> float:
        """All gaps together that have ended since `began`, a value of time.monotonic()."""
        return sum(seconds for end, seconds in list(self.gaps) if end >= began)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        previous = time.monotonic()
        while not self._closing.wait(_TICK_SECONDS):
            now = time.monotonic()
            if now - previous >= STAND_STILL_SECONDS:
                self.gaps.append((now, now - previous))
            previous = now
