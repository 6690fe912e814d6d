"""Takes over what a former server left in L1's memory."""

from __future__ import annotations

import logging
import os
from array import array
from dataclasses import dataclass, field

import msgspec

from lmcache import _native
from lmcache.clock import Clock
from lmcache.core.key import Namespace
from lmcache.core.limits import MAX_PREFAULT_THREADS, MIB
from lmcache.l1.growth import GrowingCore
from lmcache.memory.shared_memory import SharedMemory

logger = logging.getLogger("lmcache.l1")

STORAGE_OWNER = -1  # the storage loop of a server; engines' owners count from 1


@dataclass(frozen=True)
class Adoption:
    """What was taken over. `namespaces`: of the objects, by digest. `set_aside`: owners of the former life who may
    still write, each with the quarantined reservation that keeps their slots; STORAGE_OWNER stands for I/O of the
    former server itself."""

    objects: int = 0
    namespaces: dict[bytes, Namespace] = field(default_factory=dict)
    set_aside: list[tuple[int, int]] = field(default_factory=list)


def adopt(
    memory: SharedMemory,
    core: GrowingCore,
    first_offset: int,
    align_bytes: int,
    clock: Clock,
) -> Adoption:
    """Makes every frame resident that was committed and whose header verifies."""
    began = clock.monotonic()
    committed_bytes = core.resume()
    threads = min(os.cpu_count() or 1, MAX_PREFAULT_THREADS)
    left = _native.find_left_frames(
        memory.slot_table_address, memory.address + first_offset, committed_bytes, align_bytes, threads
    )
    found = [_namespace(digest, encoded) for digest, encoded in left.namespaces]
    salts = [None if namespace is None else namespace.cache_salt for namespace in found]
    # Slots of owners that hold no lock are free: nobody writes there any more.
    live = array("q", [owner for owner in left.owners if owner == STORAGE_OWNER or memory.owner_alive(owner)])
    objects, size_bytes, refused, set_aside, set_aside_bytes = core.adopt(left, salts, live.tobytes())
    logger.info(
        "L1 goes on with %d objects, %.1f MiB, of a former server, found in %.3f s%s%s",
        objects,
        size_bytes / MIB,
        clock.monotonic() - began,
        f"; {refused} were not whole and are dropped" if refused else "",
        f"; {set_aside_bytes / MIB:.1f} MiB are set aside until nobody writes there" if set_aside else "",
    )
    namespaces = {namespace.digest: namespace for namespace in found if namespace is not None}
    return Adoption(objects, namespaces, set_aside)


def _namespace(digest: bytes, encoded: bytes) -> Namespace | None:
    try:
        namespace = Namespace.decode(encoded)
    except msgspec.MsgspecError:
        return None
    return namespace if namespace.digest == digest else None
