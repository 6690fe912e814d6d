"""What a worker has reserved and not yet committed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lmcache.core.key_batch import KeyBatch, SlotGrid
from lmcache.telemetry.tracing import Trace


@dataclass
class Reservation:
    """`received` and `whole` are of frames that arrive over the socket, by (group, chunk)."""

    keys: KeyBatch
    slots: SlotGrid
    began_at: float = 0.0
    trace: Trace | None = None  # of the request whose chunks these are
    received: dict[tuple[int, int], int] = field(default_factory=dict)  # bytes of the frame, copied or being copied
    whole: set[tuple[int, int]] = field(default_factory=set)  # all of it is in L1, and it verifies
    copies: int = 0  # under way: while there are some, the reservation must not end
    when_copied: list[Callable[[], None]] = field(default_factory=list)

    def only_whole(self, written: bytes) -> bytes:
        """`written` of a commit (empty: all) without the frames that did not arrive whole."""
        flags = bytearray(self.keys.objects)
        for group, chunk in self.whole:
            position = group * self.keys.chunks + chunk
            flags[position] = written[position] if written else 1
        return bytes(flags)

    @property
    def size_bytes(self) -> int:
        return self.keys.hashes.size_bytes + self.slots.size_bytes

    def copy_ended(self) -> None:
        self.copies -= 1
        if not self.copies:
            actions, self.when_copied = self.when_copied, []
            for action in actions:
                action()


class Reservations:
    """Those of one worker, by number. Invariant: `size_bytes` is the sum of theirs."""

    def __init__(self) -> None:
        self._by_number: dict[int, Reservation] = {}
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def oldest_began_at(self) -> float | None:
        return next((reservation.began_at for reservation in self._by_number.values()), None)

    def get(self, number: int) -> Reservation | None:
        return self._by_number.get(number)

    def add(self, number: int, reservation: Reservation) -> None:
        assert number not in self._by_number
        self._by_number[number] = reservation
        self.size_bytes += reservation.size_bytes

    def remove(self, number: int) -> None:
        self.size_bytes -= self._by_number.pop(number).size_bytes
