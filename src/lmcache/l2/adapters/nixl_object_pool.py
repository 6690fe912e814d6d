"""A pool whose slots are objects of an object store. NIXL neither lists nor deletes objects there, so that a slot is
used again by writing over it, and the directory is objects, too."""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Sequence
from itertools import compress
from typing import Literal

from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.environment import Environment
from lmcache.errors import ResourceError
from lmcache.l2.adapters import nixl_pool_format as layout
from lmcache.l2.adapters.dax_format import ENTRY_BYTES
from lmcache.l2.adapters.nixl_agent import Agent
from lmcache.l2.adapters.nixl_config import NixlStoreConfig
from lmcache.l2.adapters.nixl_files import NO_HEADER, ranges_of

_GIVEN_BACK_AT_ONCE = 64


class ObjectPool:
    files: Sequence[int] = ()

    def __init__(self, config: NixlStoreConfig, environment: Environment) -> None:
        self._config = config
        self._environment = environment
        self._geometry = layout.PoolGeometry(config.pool_size, layout.PAGE_SLOTS)
        self.id = b""
        self.slots = config.pool_size
        root = f"{config.object_prefix}/nixl-pool-v1"
        self.objects = [f"{root}/slot-{slot:08}" for slot in range(self.slots)]
        self.objects += [f"{root}/directory-{page:08}" for page in range(self._geometry.pages)]
        self.buffered_fallbacks = 0
        self._pages: list[memoryview] = []  # as they are in the backend, but for times of use
        self._changed: set[int] = set()  # pages with such times
        self._lock = threading.Lock()  # of the pages and of what changed

    def open(self) -> None:
        self._pages = [
            memoryview(mmap.mmap(-1, self._geometry.page_bytes(page))) for page in range(self._geometry.pages)
        ]

    def read_directory(self, agent: Agent) -> memoryview:
        try:
            present = agent.exist(self.objects[self.slots :])
        except OSError:
            raise self._unreachable("read") from None
        entries = bytearray()
        for page, content in enumerate(self._pages):
            if present[page] and not self._move(agent, "READ", page, content):
                raise self._unreachable("read")
            found = layout.read_superblock(content)
            if page == 0:
                self.id = found[0] if found is not None else self._environment.random_bytes(layout.ID_BYTES)
            content[: layout.SUPERBLOCK_BYTES] = layout.superblock(self.id, self.slots)
            count = min(self._geometry.page_slots, self.slots - page * self._geometry.page_slots)
            entries += content[layout.SUPERBLOCK_BYTES : layout.SUPERBLOCK_BYTES + count * ENTRY_BYTES]
        if not self._move(agent, "WRITE", 0, self._pages[0]):
            raise self._unreachable("write")
        return memoryview(entries)

    def _unreachable(self, act: str) -> ResourceError:
        return ResourceError(
            f'{self._config.where}: cannot {act} objects through the NIXL backend "{self._config.backend}"; see '
            "NIXL's lines above, and whether the address, the bucket or container and the credentials are right."
        )

    def read_header(self, agent: Agent, slot: int) -> bytes:
        header = memoryview(mmap.mmap(-1, FRAME_HEADER_BYTES))
        (error,) = self.read(agent, [slot], [header])
        if error:
            raise OSError(error, f"NIXL did not read {self.objects[slot]}")
        return bytes(header)

    def write(self, agent: Agent, slots: Sequence[int], buffers: Sequence[memoryview]) -> list[int]:
        return [0 if moved else errno.EIO for moved in agent.transfer_objects("WRITE", ranges_of(buffers), slots)]

    def read(self, agent: Agent, slots: Sequence[int], targets: Sequence[memoryview]) -> list[int]:
        for target in targets:
            target[:FRAME_HEADER_BYTES] = NO_HEADER
        errors = [0 if moved else errno.EIO for moved in agent.transfer_objects("READ", ranges_of(targets), slots)]
        if any(errors):
            self._look_for_missing(agent, slots, errors)
        return errors

    def _look_for_missing(self, agent: Agent, slots: Sequence[int], errors: list[int]) -> None:
        """Somebody may have deleted objects of the pool; a backend that does not answer has not lost them."""
        failed = [at for at, error in enumerate(errors) if error]
        try:
            present = agent.exist([self.objects[slots[at]] for at in failed])
        except OSError:
            return
        for at, is_present in zip(failed, present, strict=True):
            errors[at] = errno.EIO if is_present else errno.ENOENT

    def record(self, agent: Agent, slots: Sequence[int], entries: bytes) -> None:
        places = [(self._geometry.page_of(slot), self._geometry.entry_place(slot)) for slot in slots]
        wanted = [entries[at : at + ENTRY_BYTES] for at in range(0, len(entries), ENTRY_BYTES)]
        before = self._exchange(places, wanted)
        try:
            self._write_pages(agent, {page for page, _ in places})
        except OSError:
            self._exchange(places, before)
            raise

    def _exchange(self, places: Sequence[tuple[int, int]], entries: Sequence[bytes]) -> list[bytes]:
        """What was there before."""
        before = []
        with self._lock:
            for (page, place), entry in zip(places, entries, strict=True):
                before.append(bytes(self._pages[page][place : place + ENTRY_BYTES]))
                self._pages[page][place : place + ENTRY_BYTES] = entry
        return before

    def mark_used(self, agent: Agent, slots: Sequence[int], used_ns: int) -> None:
        with self._lock:
            for at, slot in enumerate(slots):
                place, page = self._geometry.used_place(slot), self._geometry.page_of(slot)
                self._pages[page][place : place + 8] = (used_ns - 1000 * at).to_bytes(8, "little")
                self._changed.add(page)

    def give_back(self, agent: Agent, slots: Sequence[int]) -> None:
        nothing = memoryview(mmap.mmap(-1, FRAME_HEADER_BYTES))
        for start in range(0, len(slots), _GIVEN_BACK_AT_ONCE):
            part = slots[start : start + _GIVEN_BACK_AT_ONCE]
            present = agent.exist([self.objects[slot] for slot in part])
            written = list(compress(part, present))
            if any(self.write(agent, written, [nothing] * len(written))):
                raise OSError(errno.EIO, "NIXL did not write over every object")

    def flush(self, agent: Agent) -> None:
        with self._lock:
            changed = set(self._changed)
        self._write_pages(agent, changed)

    def _write_pages(self, agent: Agent, pages: set[int]) -> None:
        """Copies of them, so that nobody waits for a page while the backend takes it."""
        for page in sorted(pages):
            image = memoryview(mmap.mmap(-1, self._geometry.page_bytes(page)))
            with self._lock:
                image[:] = self._pages[page]
                self._changed.discard(page)
            if not self._move(agent, "WRITE", page, image):
                with self._lock:
                    self._changed.add(page)
                raise OSError(errno.EIO, f"NIXL did not write {self.objects[self.slots + page]}")

    def _move(self, agent: Agent, operation: Literal["READ", "WRITE"], page: int, image: memoryview) -> bool:
        (moved,) = agent.transfer_objects(operation, ranges_of([image]), [self.slots + page])
        return moved

    def close(self, *, remove: bool) -> None:
        self._pages = []
