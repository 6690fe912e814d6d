"""Takes what servers tell, in the order in which they told it.

Each server numbers its batches. A number that has come before is a duplicate. One that is missing is a gap: something
is not known, so the server is asked to raise its incarnation and tell everything again. So does a server by itself
after a restart of either side, or when it lost changes. A higher incarnation voids what was told of L1; a lower one is
stale. Memory does not depend on how much is told.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache.clock import Clock
from lmcache.environment import SYSTEM
from lmcache.errors import LMCacheError
from lmcache.fleet.directory import Directory
from lmcache.fleet.messages import Batch, EventsAnswer
from lmcache.fleet.resync_turns import ResyncTurns
from lmcache.telemetry.log_limiter import LogLimiter

logger = logging.getLogger("lmcache.fleet")


@dataclass
class Stream:
    """What has come of a server."""

    incarnation: int = 0
    seq: int = 0
    needs_resync: bool = False
    resyncs: bool = False  # everything is being told


@dataclass
class EventCounts:
    applied: int = 0
    duplicates: int = 0
    stale: int = 0
    gaps: int = 0
    resyncs: int = 0
    entries: int = 0


class EventIntake:
    """Thread-safe."""

    def __init__(self, knows: Callable[[str], bool], clock: Clock = SYSTEM.clock) -> None:
        """`knows`: whether a server of that name has joined."""
        self._knows = knows
        self._lock = threading.Lock()
        self._streams: dict[str, Stream] = {}
        self.directory = Directory(self._incarnation_of)
        self.turns = ResyncTurns(clock)
        self.counts = EventCounts()
        self.log_position = ""  # behind what was applied of a log of events
        self._log_limiter = LogLimiter(60.0, clock)

    @property
    def is_idle(self) -> bool:
        """Whether a call would not wait for another one, at this moment."""
        return not self._lock.locked() and self.directory.is_idle

    def apply(self, batches: Sequence[Batch]) -> EventsAnswer:
        applied = duplicates = stale = 0
        resync: dict[str, None] = {}
        incarnations: dict[str, int] = {}
        with self._lock:
            for batch in batches:
                instance_id = batch.instance_id
                if not self._knows(instance_id):
                    stale += 1
                    resync[instance_id] = None
                    continue
                self.turns.tells(instance_id)
                stream = self._streams.setdefault(instance_id, Stream())
                if batch.incarnation < stream.incarnation:
                    stale += 1
                    incarnations[instance_id] = stream.incarnation
                    continue
                try:
                    if batch.incarnation > stream.incarnation:
                        self._begin(instance_id, stream, batch.incarnation)
                    if batch.seq <= stream.seq:
                        duplicates += 1
                    else:
                        self._follow(stream, batch)
                        self._try(stream, batch)
                        applied += 1
                except Exception:  # a fault of this coordinator: some of the batch is not known
                    stream.needs_resync = True
                    raise
                if stream.needs_resync:
                    resync[instance_id] = None
            counts = self.counts
            counts.applied += applied
            counts.duplicates += duplicates
            counts.stale += stale
        return EventsAnswer(applied, duplicates, stale, list(resync), incarnations, packed=True)

    def _begin(self, instance_id: str, stream: Stream, incarnation: int) -> None:
        stream.needs_resync = stream.resyncs = False  # these before the incarnation: `glance`
        stream.seq = 0
        stream.incarnation = incarnation
        self.directory.forget_l1(instance_id)

    def _follow(self, stream: Stream, batch: Batch) -> None:
        if batch.seq > stream.seq + 1 and not stream.needs_resync:
            stream.needs_resync = True
            self.counts.gaps += 1
            logger.warning(
                "Of %s the batches %d to %d are missing: it is asked to tell everything again",
                *(batch.instance_id, stream.seq + 1, batch.seq - 1),
            )
        stream.seq = batch.seq

    def _try(self, stream: Stream, batch: Batch) -> None:
        """What is beyond a limit is not known; that it is told again would not help."""
        try:
            self._apply(stream, batch)
        except LMCacheError as error:
            if self._log_limiter.due():
                logger.error("A batch of %s was left out: %s", batch.instance_id, error)

    def _apply(self, stream: Stream, batch: Batch) -> None:
        place = batch.instance_id, batch.tier, batch.backend
        objects = batch.entries, batch.namespace, batch.objects
        count = batch.object_count
        self.counts.entries += count
        if batch.event_type == "store":
            stored = self.directory.store(*place, batch.shared, *objects, world_size=batch.world_size)
            if stored < count:
                raise LMCacheError(f"the directory is full, {count - stored} copies are not in it.")
        elif batch.event_type == "delete":
            self.directory.remove(*place, *objects)
        elif batch.event_type == "access":
            self.directory.count_accesses(*objects)
        elif batch.resync == "begin":
            stream.resyncs = True
            self.directory.begin_resync(batch.instance_id)
        elif batch.resync == "end":
            if stream.resyncs and not stream.needs_resync:  # else some of it is missing
                self.directory.end_resync(batch.instance_id)
                self.counts.resyncs += 1
            stream.resyncs = False
            self.turns.end(batch.instance_id)
        else:
            self.directory.set_capacity(*place, batch.shared, batch.capacity_bytes)

    def forget(self, instance_id: str) -> None:
        """It has left: what it had is not to be found any more, and it may come back with any incarnation."""
        with self._lock:
            self._streams.pop(instance_id, None)
            self.turns.end(instance_id)
            self.directory.forget(instance_id)

    def stream(self, instance_id: str) -> Stream:
        with self._lock:
            stream = self._streams.get(instance_id, Stream())
            return Stream(stream.incarnation, stream.seq, stream.needs_resync, stream.resyncs)

    def glance(self, instance_id: str) -> tuple[int, bool, int]:
        """Its incarnation, whether it is to tell everything again, and its last batch. Waits for nobody, not even for a
        batch that is being applied."""
        stream = self._streams.get(instance_id)
        return (stream.incarnation, stream.needs_resync, stream.seq) if stream is not None else (0, False, 0)

    def streams(self) -> dict[str, Stream]:
        with self._lock:
            return {
                name: Stream(stream.incarnation, stream.seq, stream.needs_resync, stream.resyncs)
                for name, stream in self._streams.items()
            }

    def restore(self, streams: dict[str, Stream]) -> None:
        with self._lock:
            self._streams.update(streams)

    def _incarnation_of(self, instance_id: str) -> int:
        stream = self._streams.get(instance_id)
        return stream.incarnation if stream is not None else 0
