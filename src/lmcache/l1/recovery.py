"""Recovery of the objects that the previous server left in L1's memory."""

from __future__ import annotations

import logging
import os
from array import array
from dataclasses import dataclass, field

import msgspec

from lmcache import _native
from lmcache._native import L1Core, QuarantinedOwner
from lmcache.clock import Clock
from lmcache.core.key import Namespace
from lmcache.core.limits import MAX_PREFAULT_THREADS, MIB
from lmcache.memory.ownership import STORAGE_OWNER
from lmcache.memory.server_memory import ServerMemory

logger = logging.getLogger("lmcache.l1")


@dataclass(frozen=True)
class RecoveredL1:
    """`objects` became resident. `namespaces`: theirs, by digest. `quarantined`: owners that may still write, and the
    reservations that hold their slots; STORAGE_OWNER stands for I/O of the previous server."""

    objects: int = 0
    namespaces: dict[bytes, Namespace] = field(default_factory=dict)
    quarantined: list[QuarantinedOwner] = field(default_factory=list)


def recover(
    memory: ServerMemory,
    core: L1Core,
    committed_bytes: int,
    first_offset: int,
    align_bytes: int,
    clock: Clock,
) -> RecoveredL1:
    """Makes every frame resident that was committed and whose header verifies. Payloads are not read.
    `committed_bytes`: how much of the slots has memory behind it."""
    began = clock.monotonic()
    threads = min(os.cpu_count() or 1, MAX_PREFAULT_THREADS)
    found = _native.recover_frames(
        memory.slot_table_address, memory.address + first_offset, committed_bytes, align_bytes, threads
    )
    decoded = [_namespace(namespace.digest, namespace.encoded) for namespace in found.namespaces]
    salts = [None if namespace is None else namespace.cache_salt for namespace in decoded]
    # Slots of owners that hold no lock are free: nobody writes there any more.
    live = array("q", [owner for owner in found.owners if owner == STORAGE_OWNER or memory.owner_alive(owner)])
    recovered = core.recover(found, salts, live.tobytes())
    logger.info(
        "L1 goes on with %d objects, %.1f MiB, of a previous server, found in %.3f s%s%s",
        recovered.objects,
        recovered.size_bytes / MIB,
        clock.monotonic() - began,
        f"; {recovered.refused} were not whole and are dropped" if recovered.refused else "",
        f"; {recovered.quarantined_bytes / MIB:.1f} MiB are in quarantine until nobody writes there"
        if recovered.quarantined
        else "",
    )
    namespaces = {namespace.digest: namespace for namespace in decoded if namespace is not None}
    return RecoveredL1(recovered.objects, namespaces, recovered.quarantined)


def _namespace(digest: bytes, encoded: bytes) -> Namespace | None:
    try:
        namespace = Namespace.decode(encoded)
    except msgspec.MsgspecError:
        return None
    return namespace if namespace.digest == digest else None
