"""Takes over what a former server left in L1's memory."""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from lmcache import _native
from lmcache.clock import Clock
from lmcache.core.key import Namespace
from lmcache.core.limits import MAX_PREFAULT_THREADS, MIB
from lmcache.errors import ResourceError
from lmcache.l1.growth import GrowingCore
from lmcache.memory.shared_memory import SharedMemory

logger = logging.getLogger("lmcache.l1")

STORAGE_OWNER = -1  # the storage loop of a server; engines' owners count from 1


@dataclass(frozen=True)
class Adoption:
    """What was taken over. `set_aside`: owners of the former life who may still write, each with the quarantined
    reservation that keeps their slots; STORAGE_OWNER stands for I/O of the former server itself."""

    objects: int = 0
    set_aside: list[tuple[int, int]] = field(default_factory=list)


def adopt(
    memory: SharedMemory,
    core: GrowingCore,
    first_offset: int,
    align_bytes: int,
    name: Callable[[Namespace], int],
    clock: Clock,
) -> Adoption:
    """Makes every frame resident that was committed and whose header verifies. `name` gives a namespace its number."""
    began = clock.monotonic()
    committed_bytes = core.resume()
    threads = min(os.cpu_count() or 1, MAX_PREFAULT_THREADS)
    left = _native.find_left_frames(
        memory.slot_table_address, memory.address + first_offset, committed_bytes, align_bytes, threads
    )
    numbers = array("I", [_number(digest, encoded, name) for digest, encoded in left.namespaces])
    # Slots of owners that hold no lock are free: nobody writes there any more.
    live = array("q", [owner for owner in left.owners if owner == STORAGE_OWNER or memory.owner_alive(owner)])
    objects, size_bytes, refused, set_aside, set_aside_bytes = core.adopt(left, numbers.tobytes(), live.tobytes())
    logger.info(
        "L1 goes on with %d objects, %.1f MiB, of a former server, found in %.3f s%s%s",
        objects,
        size_bytes / MIB,
        clock.monotonic() - began,
        f"; {refused} were not whole and are dropped" if refused else "",
        f"; {set_aside_bytes / MIB:.1f} MiB are set aside until nobody writes there" if set_aside else "",
    )
    return Adoption(objects, set_aside)


def _number(digest: bytes, encoded: bytes, name: Callable[[Namespace], int]) -> int:
    try:
        namespace = Namespace.decode(encoded)
        return name(namespace) if namespace.digest == digest else _native.NO_NAMESPACE
    except (msgspec.MsgspecError, ResourceError):
        return _native.NO_NAMESPACE
