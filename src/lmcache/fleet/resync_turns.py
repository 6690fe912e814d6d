"""How many servers tell everything at a time: after a restart of the coordinator all of them are to.

Invariant: at most MAX_FLEET_RESYNCS servers have a turn. They get theirs in the order in which they asked. A turn ends
with the end of what is told, when the server leaves, when nothing has come of it for a while, or after
LONGEST_SECONDS: its end may have been refused, and changes keep coming.
"""

from __future__ import annotations

import threading

from lmcache.clock import Clock
from lmcache.core.limits import MAX_FLEET_RESYNCS

SILENT_SECONDS = 30.0  # until a server that does not tell on, or does not ask on, has lost its turn
LONGEST_SECONDS = 600.0  # of a turn
_ASK_SECONDS = 0.25  # from one question of those that are next to the other
_ASKS_A_SECOND = 64.0  # of the others, further back by so many asks a second later


class ResyncTurns:
    """Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._ends_at: dict[str, float] = {}  # of servers that have a turn, unless something comes of them
        self._began_at: dict[str, float] = {}  # of the same
        self._leaves_at: dict[str, float] = {}  # of those that wait, in their order, unless they ask again

    def ask(self, instance_id: str) -> float:
        """0: it is that server's turn. Else in how many seconds it is to ask again."""
        with self._lock:
            monotonic = self._clock.monotonic()
            for times in (self._ends_at, self._leaves_at):
                for name in [name for name, end in times.items() if end < monotonic]:
                    del times[name]
            self._began_at = {name: self._began_at[name] for name in self._ends_at}
            self._leaves_at.setdefault(instance_id, 0.0)
            place = 0 if instance_id in self._ends_at else list(self._leaves_at).index(instance_id)
            if instance_id in self._ends_at or place < MAX_FLEET_RESYNCS - len(self._ends_at):
                del self._leaves_at[instance_id]
                self._ends_at[instance_id] = monotonic + SILENT_SECONDS
                self._began_at[instance_id] = monotonic
                return 0.0
            wait_seconds = max(_ASK_SECONDS, place / _ASKS_A_SECOND)
            self._leaves_at[instance_id] = monotonic + wait_seconds + SILENT_SECONDS
            return wait_seconds

    def waits(self, instance_id: str) -> bool:
        with self._lock:
            return instance_id in self._leaves_at

    def has(self, instance_id: str) -> bool:
        with self._lock:
            return instance_id in self._ends_at

    def tells(self, instance_id: str) -> None:
        """Something has come of it."""
        with self._lock:
            if instance_id in self._ends_at:
                latest = self._began_at[instance_id] + LONGEST_SECONDS
                self._ends_at[instance_id] = min(self._clock.monotonic() + SILENT_SECONDS, latest)

    def end(self, instance_id: str) -> None:
        """It has told everything, or has left."""
        with self._lock:
            self._ends_at.pop(instance_id, None)
            self._began_at.pop(instance_id, None)
            self._leaves_at.pop(instance_id, None)
