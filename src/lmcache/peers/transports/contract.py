"""The contract of a transport: frames from one peer into memory of this server, each verified before it counts.

A transport is told what to fetch and until when; who has what, leases, breakers and figures are the peer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome


@dataclass(frozen=True, slots=True)
class Transfer:
    """Frames of one peer. `sizes`: of each, as the peer said it. `slots`: where it lies in the peer's memory, as
    offsets; empty where it did not say so. `lease` keeps them there, as long as it runs; 0: nothing does."""

    keys: Sequence[ObjectKey]
    buffers: Sequence[memoryview]
    sizes: Sequence[int]
    slots: Sequence[int]
    lease: int
    room_bytes: int  # of the buffers: more than that does not come, whatever the peer says
    seconds: float  # until it is to end

    def within(self, seconds: float) -> Transfer:
        """Returns the same, which is to end in `seconds`."""
        return Transfer(self.keys, self.buffers, self.sizes, self.slots, self.lease, self.room_bytes, seconds)

    def pick(self, indices: Sequence[int], seconds: float) -> Transfer:
        """Returns the transfer of these positions, which is to end in `seconds`."""
        if len(indices) == len(self.keys):
            return self.within(seconds)

        def of(values: Sequence[int]) -> Sequence[int]:
            return [values[index] for index in indices] if values else values

        keys, buffers = [self.keys[index] for index in indices], [self.buffers[index] for index in indices]
        room_bytes = sum(buffer.nbytes for buffer in buffers)
        return Transfer(keys, buffers, of(self.sizes), of(self.slots), self.lease, room_bytes, seconds)


@dataclass(frozen=True, slots=True)
class Fetched:
    """LOADED: the buffer has the whole frame of its key, verified. CORRUPT: what came was another thing. FAILED: it did
    not come, because of `fault`."""

    outcomes: Sequence[LoadOutcome]
    fault: BaseException | None = None


class Transport(Protocol):
    @property
    def name(self) -> str:
        """The transport's name in metrics."""
        ...

    async def fetch(self, transfer: Transfer) -> Fetched:
        """Never raises for what the peer does. No buffer is touched any more when it returns."""
        ...

    def close(self) -> None:
        """Ends what is under way: each `fetch` returns soon. Idempotent."""
