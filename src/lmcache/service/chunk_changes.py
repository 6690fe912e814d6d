"""What an engine with KV events is told: which of its chunks came and went, in which tier, in the order of the indexes.

The indexes note what changes while somebody follows them (native/include/lmcache/change_log.h). A reply names the
chunks that changed and says where each is now, so that a reader which goes on from cursor to cursor ends up with what
is there, whatever was in between.
"""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from lmcache._native import ChangePage
from lmcache.core import limits
from lmcache.core.key import CHUNK_HASH_BYTES, Namespace
from lmcache.core.key_batch import NamespaceSet
from lmcache.errors import RemoteError
from lmcache.protocol.messages import ChunkChanges, ChunkChangesReply, ErrorCode
from lmcache.service.context import ServiceContext
from lmcache.service.instances import Instance, InstanceRegistry, Tenant
from lmcache.tiering.namespace_directory import stored_namespace

log = logging.getLogger("lmcache.service")

IN_L1, IN_L2 = 1, 2  # of `ChunkChangesReply.tiers`
_POSITION_BYTES = 4


class _Index(Protocol):
    def watch_changes(self) -> int: ...
    def unwatch_changes(self) -> None: ...
    def changes(self, cursor: int, most: int) -> ChangePage: ...


@dataclass(frozen=True)
class _Source:
    """L1, or what one adapter holds. `serde`: what its namespaces are marked with, "" for nothing."""

    index: _Index
    serde: str = ""
    is_shared: bool = False


@dataclass(frozen=True)
class _Digests:
    """The digests of the namespaces of a salt that a chunk must be in: packed, and each."""

    packed: bytes
    names: frozenset[bytes]


@dataclass
class _Followed:
    """The salts of one call, by their positions in it."""

    salts: list[int]
    tenants: list[Tenant]


class ChunkChangeService:
    """Handler of chunk_changes. Belongs to the message loop, which it never waits in: a call looks at a limited number
    of changes and chunks. While nobody asks, nothing is noted and nothing costs anything."""

    def __init__(self, context: ServiceContext, registry: InstanceRegistry) -> None:
        self._context = context
        self._registry = registry
        self._core = context.l1.core
        self._metrics = context.metrics
        self._epoch = context.settings.server_epoch
        self._readers: dict[str, float] = {}  # instances that follow, and when each asked last
        self._sources: list[_Source] = []  # watched; L1 first
        self._digests: WeakKeyDictionary[Tenant, list[_Digests]] = WeakKeyDictionary()  # of each source

    # ---- handler -----------------------------------------------------------------------------------------------------
    def chunk_changes(self, message: ChunkChanges) -> ChunkChangesReply:
        instance, _ = self._registry.scheduled(message.instance_id)
        asked = array("I", _whole("asked_salts", message.asked_salts, _POSITION_BYTES))
        chunks = len(_whole("asked_hashes", message.asked_hashes, CHUNK_HASH_BYTES)) // CHUNK_HASH_BYTES
        if len(asked) != chunks or any(salt >= len(message.salts) for salt in asked):
            raise RemoteError(
                ErrorCode.BAD_REQUEST, "There must be the position of a salt for each chunk that is asked for."
            )
        self._count(message.counts)
        self._follow(instance)
        followed, unused = self._salts(instance, message.salts)
        widths = [len(self._digests_of(tenant)[0].packed) // CHUNK_HASH_BYTES for tenant in followed.tenants]
        if chunks * max(widths, default=1) > limits.MAX_SLOTS_PER_CALL:
            raise RemoteError(
                ErrorCode.TOO_LARGE, f"A call covers at most {limits.MAX_SLOTS_PER_CALL} chunks times namespaces."
            )
        cursor, pages, lost = self._read(instance, message)
        more = any(len(page) == self._most_changes for page in pages)
        answered: dict[int, dict[bytes, None]] = {salt: {} for salt in followed.salts}  # chunks, by salt
        for source, page in zip(self._sources, pages, strict=True):
            if len(page) and (message.shared_l2 or not source.is_shared):
                self._add_changed(answered, followed, source, page)
        for number, salt in enumerate(asked):
            if salt in answered:
                start = number * CHUNK_HASH_BYTES
                answered[salt][message.asked_hashes[start : start + CHUNK_HASH_BYTES]] = None
        positions, hashes, tiers = array("I"), bytearray(), bytearray()
        for salt, tenant in zip(followed.salts, followed.tenants, strict=True):
            if of_salt := b"".join(answered[salt]):
                hashes += of_salt
                tiers += self._tiers(tenant, of_salt, shared_l2=message.shared_l2)
                positions.extend([salt] * (len(of_salt) // CHUNK_HASH_BYTES))
        self._metrics.chunk_changes.inc(len(tiers))
        return ChunkChangesReply(cursor, lost, more, unused, positions.tobytes(), bytes(hashes), bytes(tiers))

    def _count(self, counts: list[int]) -> None:
        counters = (
            self._metrics.kv_events.labels("stored"),
            self._metrics.kv_events.labels("removed"),
            self._metrics.kv_events_skipped.labels("unknown"),
            self._metrics.kv_events_skipped.labels("no_room"),
        )
        for counter, count in zip(counters, counts, strict=False):
            counter.inc(max(0, count))

    # ---- changes -----------------------------------------------------------------------------------------------------
    @property
    def _most_changes(self) -> int:
        """Looked at in each index."""
        return limits.MAX_CHANGES_PER_CALL // max(1, len(self._sources))

    def _read(self, instance: Instance, message: ChunkChanges) -> tuple[list[int], list[ChangePage], bool]:
        """The next cursor, the changes up to there, and whether changes before it are unknown."""
        registrations, *cursors = message.cursor or [-1]
        is_current = (
            message.server_epoch == self._epoch
            and registrations == instance.registrations
            and len(cursors) == len(self._sources)
            and all(0 <= cursor < 1 << 64 for cursor in cursors)
        )
        if not is_current:
            cursors = [(1 << 64) - 1] * len(self._sources)  # was never given out
        most = self._most_changes
        pages = [source.index.changes(cursor, most) for source, cursor in zip(self._sources, cursors, strict=True)]
        lost = any(page.lost for page in pages)
        if lost and message.cursor:
            self._metrics.chunk_changes_lost.inc()
        return [instance.registrations, *(page.next_cursor for page in pages)], pages, lost

    def _add_changed(
        self, answered: dict[int, dict[bytes, None]], followed: _Followed, source: _Source, page: ChangePage
    ) -> None:
        of_source = self._sources.index(source)
        changed = set(page.namespaces)
        salts, packed, width = [], [], 0
        for salt, tenant in zip(followed.salts, followed.tenants, strict=True):
            digests = self._digests_of(tenant)[of_source]
            if not digests.names.isdisjoint(changed):
                salts.append(salt)
                packed.append(digests.packed)
                width = len(digests.packed) // CHUNK_HASH_BYTES
        if not salts:
            return
        sets, hashes = page.chunks(b"".join(packed), width)
        for number, position in enumerate(memoryview(sets).cast("I")):
            start = number * CHUNK_HASH_BYTES
            answered[salts[position]][hashes[start : start + CHUNK_HASH_BYTES]] = None

    # ---- where chunks are --------------------------------------------------------------------------------------------
    def _tiers(self, tenant: Tenant, hashes: bytes, *, shared_l2: bool) -> bytes:
        l1_digests, *l2_digests = self._digests_of(tenant)
        tiers = bytearray(self._core.resident_in_all(l1_digests.packed, hashes))
        runners = self._context.storage.own_runners if l2_digests else ()
        for digests, runner in zip(l2_digests, runners, strict=True):
            if runner.config.is_shared and not shared_l2:
                continue
            for chunk, is_known in enumerate(runner.ledger.native.known_in_all(digests.packed, hashes)):
                tiers[chunk] |= IN_L2 * is_known
        return bytes(tiers)

    def _salts(self, instance: Instance, salts: list[str]) -> tuple[_Followed, list[int]]:
        """Those that the instance uses, and the positions of the others: it is told of no salt because it names it."""
        followed, unused = _Followed([], []), []
        for position, salt in enumerate(salts):
            tenant = instance.tenants.get(salt)
            if tenant is None or tenant.of_all_ranks() is None:
                unused.append(position)
            else:
                followed.salts.append(position)
                followed.tenants.append(tenant)
        return followed, unused

    def _digests_of(self, tenant: Tenant) -> list[_Digests]:
        """For each source."""
        if (known := self._digests.get(tenant)) is None:
            namespaces = tenant.of_all_ranks()
            assert namespaces is not None
            counted = _counted(namespaces)
            known = [_digests(counted, source.serde) for source in self._sources]
            self._digests[tenant] = known
        return known

    # ---- who follows -------------------------------------------------------------------------------------------------
    def _follow(self, instance: Instance) -> None:
        if not self._readers:
            self._watch()
        self._readers[instance.instance_id] = self._context.clock.monotonic()

    def _watch(self) -> None:
        runners = self._context.storage.own_runners if self._context.settings.has_l2 else []
        sources = [
            _Source(self._core),
            *(_Source(runner.ledger.native, runner.serde_name, runner.config.is_shared) for runner in runners),
        ]
        for source in sources:
            source.index.watch_changes()
            self._sources.append(source)
        self._context.loop.call_later(limits.CHANGES_UNREAD_SECONDS, self._end_silent)

    def _end_silent(self) -> None:
        """A reader that comes back after this has lost changes, and begins anew."""
        last = self._context.clock.monotonic() - limits.CHANGES_UNREAD_SECONDS
        self._readers = {instance: asked_at for instance, asked_at in self._readers.items() if asked_at > last}
        if self._readers:
            self._context.loop.call_later(limits.CHANGES_UNREAD_SECONDS, self._end_silent)
            return
        for source in self._sources:
            source.index.unwatch_changes()
        self._sources = []
        self._digests.clear()


def _whole(name: str, packed: bytes, element_bytes: int) -> bytes:
    if len(packed) % element_bytes:
        raise RemoteError(ErrorCode.BAD_REQUEST, f"{name} must have {element_bytes} bytes for each chunk.")
    return packed


def _counted(namespaces: NamespaceSet) -> list[Namespace]:
    """A group with a tail keeps the end of a prompt alone: where there are others, they say what is there."""
    if not namespaces.tail_chunks:
        return list(namespaces.namespaces)
    whole = [
        namespace for namespace, tail in zip(namespaces.namespaces, namespaces.tail_chunks, strict=True) if not tail
    ]
    return whole or list(namespaces.namespaces)


def _digests(namespaces: list[Namespace], serde: str) -> _Digests:
    """Returns the digests of the namespaces where that serde stores them."""
    names = [stored_namespace(namespace, serde).digest for namespace in namespaces]
    return _Digests(b"".join(names), frozenset(names))
