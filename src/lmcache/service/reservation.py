"""What a worker has reserved and not yet committed."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.service.keyspace import Keyspace


@dataclass
class Reservation:
    """`slots`: u64 [group][chunk]. What follows is of frames that arrive over the socket, by position in `slots`."""

    keyspace: Keyspace
    hashes: bytes
    slots: bytes
    received: dict[int, int] = field(default_factory=dict)  # bytes of the frame, copied or being copied
    whole: set[int] = field(default_factory=set)  # all of it is in L1, and it verifies
    copies: int = 0  # under way: while there are some, the reservation must not end
    when_copied: list[Callable[[], None]] = field(default_factory=list)

    @property
    def chunks(self) -> int:
        return len(self.hashes) // CHUNK_HASH_BYTES

    @property
    def positions(self) -> int:
        return len(self.keyspace.namespaces) * self.chunks

    def slot(self, position: int) -> int:
        (offset,) = struct.unpack_from("<Q", self.slots, 8 * position)
        return int(offset)

    def chunk_hash(self, chunk: int) -> bytes:
        return self.hashes[chunk * CHUNK_HASH_BYTES : (chunk + 1) * CHUNK_HASH_BYTES]

    def only_whole(self, written: bytes) -> bytes:
        """`written` of a commit (empty: all) without the frames that did not arrive whole."""
        flags = bytearray(self.positions)
        for position in self.whole:
            flags[position] = written[position] if written else 1
        return bytes(flags)

    @property
    def size_bytes(self) -> int:
        return len(self.hashes) + len(self.slots)

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

    def get(self, number: int) -> Reservation | None:
        return self._by_number.get(number)

    def add(self, number: int, reservation: Reservation) -> None:
        assert number not in self._by_number
        self._by_number[number] = reservation
        self.size_bytes += reservation.size_bytes

    def remove(self, number: int) -> None:
        self.size_bytes -= self._by_number.pop(number).size_bytes
