"""One file an object, moved by native threads (docs/formats/files.md).

The name of a file is its whole key, so a lookup of something that another server stored is a stat. What the folder
holds is found by a scan in the background; until it has ended lookups work the same way.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from array import array
from collections.abc import Sequence

from lmcache import _native
from lmcache.clock import wall_ns
from lmcache.core.folders import refuse_unwritable
from lmcache.core.key import ObjectKey
from lmcache.core.limits import FRAME_ALIGN_BYTES
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.environment import SYSTEM, Environment
from lmcache.errors import ResourceError
from lmcache.l2.adapter import Capacity, Inventory, ObjectColumns
from lmcache.l2.adapters import folder
from lmcache.l2.adapters.folder_config import FolderSettings, IoEngine
from lmcache.l2.adapters.folder_lease import FolderLease
from lmcache.l2.adapters.io_engine_probe import (
    SMALLEST_CAPACITY_BYTES,
    TRIAL_BYTES,
    TRIAL_SECONDS,
    Trial,
    trial_paths,
    try_engines,
)
from lmcache.l2.adapters.scan_order import MAX_TIME_NS, slices
from lmcache.l2.background import in_thread, spawn
from lmcache.l2.native_device import usable_queue_depth
from lmcache.l2.native_files import FileMover, NativeFiles
from lmcache.telemetry.log_limiter import LogLimiter
from lmcache.telemetry.logs import level_of

log = logging.getLogger("lmcache.l2")

WATCH_SECONDS = 30.0
WATCH_MAX_SECONDS = 300.0  # below folder_lease.SILENT_SECONDS: each round renews the folder lease
SCAN_SHARE = 50  # the pause after a scan, in multiples of its duration
MAX_UNREMOVABLE = 65_536
INVENTORY_SLICE = 4096
UNLINK_SLICE = 4096
LISTED_FOLDERS = 16  # at a time
TAILS_RETRIED = 3

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_GONE = (0, errno.ENOENT, errno.ENOTDIR)
_PRESENT = (StoreOutcome.STORED, StoreOutcome.ALREADY_THERE)
_FOREIGN = {errno.EINVAL, errno.ELOOP, errno.EISDIR}


class FsNativeAdapter:
    """`fs` and `fs_native`; `nixl_store_dynamic` has other parts move the files."""

    verifies = True

    def __init__(self, config: FolderSettings, environment: Environment = SYSTEM) -> None:
        self.capacity = Capacity(config.limit_bytes)
        self._environment = environment
        self._name = config.name
        self._config = config
        self._base = config.folder
        self._tmp = config.tmp_folder
        self._engine: IoEngine = config.engine
        limit_bytes = config.limit_bytes
        if self._engine == "auto" and limit_bytes is not None and limit_bytes < SMALLEST_CAPACITY_BYTES:
            self._engine = "posix"
        self._queue_depth = usable_queue_depth(self._engine, config.threads, config.name)
        self._stamps: dict[str, int] = {}
        self._searched_until_ns = MAX_TIME_NS  # all that the first scan finds is older than what is stored meanwhile
        self._base_bytes = folder.FOLDER_BYTES
        self._quarantined_bytes = 0
        self._unremovable: set[ObjectKey] = set()  # corrupt, and neither moved nor deleted
        self._fault_limiter = LogLimiter()
        self._sequence = 0
        self._shared = False
        self._stopping = False
        self._fallback_limiter = LogLimiter()
        self._watcher: asyncio.Task[None] | None = None
        self._trial: asyncio.Task[Trial | None] | None = None

    def overhead_bytes(self) -> int:
        fixed = 5  # temporary files, .lmcache, its writers, this writer's file, quarantine
        trial_bytes = TRIAL_BYTES if self._engine == "auto" and self.capacity.limit_bytes is not None else 0
        return self._base_bytes + fixed * folder.FOLDER_BYTES + self._quarantined_bytes + trial_bytes

    def status(self) -> dict[str, int]:
        if not self._watcher:
            return {}
        return {"buffered_fallbacks": self.buffered_fallbacks, "io_uring": int(self._queue_depth > 0)}

    @property
    def buffered_fallbacks(self) -> int:
        return self._writes.buffered_fallbacks + self._reads.buffered_fallbacks

    async def open(self, inventory: Inventory) -> None:
        try:
            self._folder_lease = await in_thread("l2-open", self._prepare)
        except OSError as error:
            raise _unwritable(self._config, error) from None
        self.capacity = Capacity(
            self.capacity.limit_bytes,
            self._folder_lease.unit_bytes(),
            folder.ENTRY_BYTES,
            folder_bytes=folder.FOLDER_BYTES + folder.ENTRY_BYTES,
        )
        if self._engine == "auto":
            await self._choose_engine()
        # Lookups and loads have threads of their own, so that they never queue behind stores.
        self._writes, self._reads = self._make_files()
        self._inventory = inventory
        self._watcher = spawn(self._watch(), f"{self._name}-watch")

    async def _choose_engine(self) -> None:
        """Waits at most TRIAL_SECONDS; a trial that is not done by then is ended by `_end_trial`."""
        loop = asyncio.get_running_loop()
        self._trial = loop.create_task(
            in_thread(
                "l2-trial",
                try_engines,
                self._trial_paths,
                self._config.threads,
                self._config.use_odirect,
                self._environment,
            )
        )
        done, _ = await asyncio.wait({self._trial}, timeout=TRIAL_SECONDS)
        trial = self._trial.result() if done else None
        self._queue_depth = self._config.threads if trial is not None and trial.prefers_ring else 0
        measured = "no trial within its time, or io_uring is refused"
        if trial is not None:
            rounds = (trial.threads, trial.ring)
            threads, ring = (" ".join(f"{seconds * 1e3:.1f}" for seconds in engine) for engine in rounds)
            measured = f"trial: threads {threads} ms, io_uring {ring} ms"
        log.info(
            "%s: %s the files (%s)", self._name, "io_uring moves" if self._queue_depth else "threads move", measured
        )

    async def _end_trial(self) -> None:
        """Waits for a late trial before its files are deleted, as it may still write some."""
        if self._trial is not None:
            await asyncio.wait({self._trial})
            self._trial = None
            await self._unlink(self._trial_paths)

    @property
    def _trial_paths(self) -> list[str]:
        return trial_paths(f"{self._base}/{folder.OWN_FOLDER}", self._folder_lease.id)

    def _make_files(self) -> tuple[FileMover, FileMover]:
        """For stores and deletes, for loads and lookups."""
        return self._native_files(), self._native_files()

    def _native_files(self) -> NativeFiles:
        return NativeFiles(
            self._config.threads,
            use_odirect=self._config.use_odirect,
            block_bytes=FRAME_ALIGN_BYTES,
            read_ahead_bytes=self._config.read_ahead_size or 0,
            queue_depth=self._queue_depth,
        )

    def _prepare(self) -> FolderLease:
        os.makedirs(self._base, mode=folder.FOLDER_MODE, exist_ok=True)
        temporary = folder.make(self._base, self._tmp)
        lease = FolderLease(self._base, self._environment.random_bytes)
        try:
            # Both folders must be writable and on one file system: publishing is a rename.
            trial = os.path.join(temporary, f"{lease.id}.0.tmp")
            os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o660))
            target = os.path.join(self._base, folder.OWN_FOLDER, f"{lease.id}.trial")
            try:
                os.rename(trial, target)
            except OSError:
                os.unlink(trial)
                raise
            os.unlink(target)
            # Recovery and eviction need the right to list it.
            os.listdir(self._base)
        except OSError:
            lease.close()
            raise
        return lease

    # ---- objects -----------------------------------------------------------------------------------------------------
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        outcomes = [StoreOutcome.FAILED] * len(keys)
        pending = list(range(len(keys)))
        if self._shared:
            sizes = await self.probe(keys)
            for index in pending:
                if sizes[index] == buffers[index].nbytes:
                    outcomes[index] = StoreOutcome.ALREADY_THERE
            pending = [index for index in pending if outcomes[index] is StoreOutcome.FAILED]
        paths = [self._path(key) for key in keys]
        for _ in range(1 + TAILS_RETRIED):
            if not pending:
                break
            written, errors = await self._writes.write(
                [paths[index] for index in pending],
                [self._temporary(paths[index]) for index in pending],
                [buffers[index] for index in pending],
            )
            self._note_fallbacks()
            stored = sum(1 for result in written if result >= 0)
            for index in pending[:stored]:
                outcomes[index] = StoreOutcome.STORED
            if stored == len(pending):
                self._fault_limiter.reset()
                break
            fault = next((error for error in errors if error not in (0, errno.ECANCELED)), errno.EIO)
            if fault in _NO_ROOM:
                for index in pending[stored:]:
                    outcomes[index] = StoreOutcome.FULL
                break
            self._say(fault, "write", paths[pending[stored]])
            # The objects after the failed one were not written; they are tried again without it.
            pending = pending[stored + 1 :]
        if pending or StoreOutcome.FAILED in outcomes:
            await self._remove_empty(
                [path for path, outcome in zip(paths, outcomes, strict=True) if outcome not in _PRESENT]
            )
        return outcomes

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        _, errors = await self._reads.read_frames(self._base, keys, buffers)
        self._note_fallbacks()
        if not any(errors):
            return [LoadOutcome.LOADED] * len(keys)
        outcomes = []
        for index, error in enumerate(errors):
            if error == 0:
                outcomes.append(LoadOutcome.LOADED)
            elif error in (errno.ENOENT, errno.ENOTDIR):
                outcomes.append(LoadOutcome.MISSING)
            elif error in _FOREIGN or error == errno.EBADMSG:
                outcomes.append(LoadOutcome.CORRUPT)
            else:
                self._say(error, "read", self._path(keys[index]))
                outcomes.append(LoadOutcome.FAILED)
        corrupt = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is LoadOutcome.CORRUPT]
        if corrupt:
            await self.delete(corrupt, corrupt=True)
        return outcomes

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        sizes, errors = await self._reads.stat([self._path(key) for key in keys])
        found: list[int | None] = []
        for key, size, error in zip(keys, sizes, errors, strict=True):
            is_present = error == 0 and key not in self._unremovable
            found.append(size if is_present else None)
            if error not in (0, errno.ENOENT, errno.ENOTDIR) and error not in _FOREIGN:
                self._say(error, "look up", self._path(key))
        return found

    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        if corrupt:
            return await self._quarantine(keys)
        paths = [self._path(key) for key in keys]
        errors = await self._unlink(paths)
        await self._remove_empty(paths)
        return [error in _GONE for error in errors]

    async def clear(self) -> tuple[int, int]:
        contents = await in_thread("l2-clear", folder.scan, self._base, self._tmp, self._is_stopping)
        digests = [namespace.digest.hex() for namespace in contents.namespaces]
        paths = [
            folder.object_path(self._base, digests[owner], contents.hash_of(index).hex())
            for index, owner in enumerate(contents.owners)
        ]
        errors = await self._unlink(paths)
        await self._remove_empty(paths)
        await in_thread("l2-clear", folder.remove_empty, self._base, contents.empty)
        self._quarantined_bytes = await in_thread("l2-clear", self._quarantined)
        objects = sum(error == 0 for error in errors)
        size_bytes = sum(size for size, error in zip(contents.sizes, errors, strict=True) if error == 0)
        return objects, size_bytes

    async def close(self) -> None:
        if self._watcher is None:
            return
        self._stopping = True
        self._watcher.cancel()
        await asyncio.gather(self._watcher, return_exceptions=True)
        self._watcher = None
        await self._end_trial()
        await self._writes.close()
        await self._reads.close()
        await in_thread("l2-close", self._folder_lease.close)

    # ---- names -------------------------------------------------------------------------------------------------------
    def _path(self, key: ObjectKey) -> str:
        return folder.object_path(self._base, key.namespace.digest.hex(), key.chunk_hash.hex())

    def _temporary(self, path: str) -> str:
        self._sequence += 1
        name = f"{self._folder_lease.id}.{self._sequence}.tmp"
        if self._tmp:
            return f"{self._base}/{self._tmp}/{name}"
        parent, _, file = path.rpartition("/")
        return f"{parent}/.{file[:64]}.{name}"

    # ---- faults ------------------------------------------------------------------------------------------------------
    def _say(self, error: int, act: str, path: str) -> None:
        """One line for each kind of fault until a store succeeds again."""
        if self._fault_limiter.due(error):
            log.warning("%s: cannot %s %s: %s (errno %d)", self._name, act, path, os.strerror(error), error)

    def _note_fallbacks(self) -> None:
        if self.buffered_fallbacks and self._fallback_limiter.due():
            log.warning(
                "%s: O_DIRECT is not possible for some operations in %s; these go through the page cache. "
                "Sizes or addresses do not fit the file system: see --chunk-size and --l1-align-bytes.",
                self._name,
                self._base,
            )

    async def _quarantine(self, keys: Sequence[ObjectKey]) -> list[bool]:
        def move() -> tuple[list[bool], int]:
            names = [(key.namespace.digest.hex(), key.chunk_hash.hex()) for key in keys]
            now_ns = wall_ns(self._environment.clock)
            return [folder.quarantine(self._base, *name, now_ns) for name in names], self._quarantined()

        gone, self._quarantined_bytes = await in_thread("l2-quarantine", move)
        await self._remove_empty([self._path(key) for key in keys])
        if len(self._unremovable) > MAX_UNREMOVABLE:
            self._unremovable.clear()
        self._unremovable.update(key for key, moved in zip(keys, gone, strict=True) if not moved)
        return gone

    def _quarantined(self) -> int:
        """Bytes. Blocks."""
        try:
            return folder.trim_quarantine(self._base)
        except OSError:
            return self._quarantined_bytes  # until the folder can be searched again

    async def _unlink(self, paths: Sequence[str]) -> array[int]:
        errors = array("i")
        for start in range(0, len(paths), UNLINK_SLICE):
            errors.extend((await self._writes.unlink(paths[start : start + UNLINK_SLICE])).errors)
        return errors

    async def _remove_empty(self, paths: Sequence[str]) -> None:
        """Removes the folders of these files where they are empty."""
        folders = list({os.path.dirname(path) for path in paths})
        for start in range(0, len(folders), UNLINK_SLICE):
            await self._writes.remove_empty(folders[start : start + UNLINK_SLICE])

    # ---- what the folder holds ---------------------------------------------------------------------------------------
    def _is_stopping(self) -> bool:
        return self._stopping

    async def _watch(self) -> None:
        """Scans once, and again while other servers write here; alone, only looks for removed files."""
        await self._end_trial()
        scan_seconds = await self._scan_or_say()
        self._inventory.complete()
        while True:
            await asyncio.sleep(min(max(WATCH_SECONDS, SCAN_SHARE * scan_seconds), WATCH_MAX_SECONDS))
            before = self._shared
            try:
                self._shared = bool(await in_thread("l2-watch", self._folder_lease.others))
            except OSError as error:
                self._say(error.errno or errno.EIO, "search", self._base)
            if self._shared or before:
                scan_seconds = await self._scan_or_say()
            else:
                await self._notice_deletions()

    async def _scan_or_say(self) -> float:
        """Seconds that the scan took."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            await self._scan()
        except Exception as error:  # the root of a task: the adapter serves without an inventory, by stat
            log.log(level_of(error), "%s: the folder %s could not be searched", self._name, self._base, exc_info=True)
        return loop.time() - started

    async def _scan(self) -> None:
        loop = asyncio.get_running_loop()
        scan, started = self._inventory.begin_scan(), loop.time()
        contents, order, quarantined, others = await in_thread("l2-scan", self._search)
        self._shared = bool(others)
        for fault in contents.faults[:1]:
            log.warning("%s: %d folders could not be searched, the first: %s", self._name, len(contents.faults), fault)
        self._quarantined_bytes = quarantined
        for rows, newer in slices(order, contents.used_ns, self._searched_until_ns, INVENTORY_SLICE):
            columns = (contents.namespaces, contents.owners, contents.hashes, contents.sizes, rows)
            self._inventory.found(ObjectColumns(*columns), newer=newer)
            await asyncio.sleep(0)
        # By the clock of the file system. What was stored behind the back of a scan may be as old as its beginning.
        newest_ns = contents.used_ns[order[0]] if order else 0
        self._searched_until_ns = max(0, newest_ns - int((loop.time() - started) * 1e9))
        for keys in self._inventory.known(unseen_by=scan):
            await self._report_lost(keys)
            await asyncio.sleep(0)

    def _search(self) -> tuple[folder.Contents, array[int], int, set[str]]:
        """The contents, their order (youngest first), bytes in quarantine, ids of other live writers."""
        contents = folder.scan(self._base, self._tmp, self._is_stopping)
        # After the scan: the temporary files that it saw of a writer that is dead by now have no use.
        others = self._folder_lease.others()
        live = {self._folder_lease.id, *others}
        folder.remove_temporary(self._base, [path for path, writer in contents.temporary if writer not in live])
        folder.remove_empty(self._base, contents.empty)
        self._base_bytes = folder.base_bytes(self._base)
        order = array("I", _native.youngest_first(memoryview(contents.used_ns)))
        return contents, order, folder.trim_quarantine(self._base), others

    async def _notice_deletions(self) -> None:
        """Reports known objects that are missing in folders that changed since the last time, or are gone."""
        stamps, self._base_bytes = await in_thread("l2-watch", self._look)
        same = {name for name, stamp in stamps.items() if self._stamps.get(name) == stamp}
        has_changed = not stamps or stamps != self._stamps
        self._stamps = stamps
        if not has_changed:
            return
        scan = self._inventory.begin_scan()
        changed = sorted(stamps.keys() - same)
        for start in range(0, len(changed), LISTED_FOLDERS):
            names = changed[start : start + LISTED_FOLDERS]
            for digest, hashes in await in_thread("l2-watch", folder.objects_named, self._base, names):
                self._inventory.seen(digest, hashes)
        for keys in self._inventory.known(unseen_by=scan, passed_over=folder.first_bytes(same)):
            await self._report_lost(keys)
            await asyncio.sleep(0)

    def _look(self) -> tuple[dict[str, int], int]:
        try:
            return folder.stamps(self._base), folder.base_bytes(self._base)
        except OSError:  # it is gone
            return {}, self._base_bytes

    async def _report_lost(self, keys: Sequence[ObjectKey]) -> None:
        """Those that are not there. They are looked up once more: one may have been stored during a scan."""
        if keys:
            sizes = await self.probe(keys)
            self._inventory.lost([key for key, size in zip(keys, sizes, strict=True) if size is None])


def _unwritable(config: FolderSettings, error: OSError) -> ResourceError:
    where, base, key = config.where, config.folder, config.folder_key
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return ResourceError(f"{where}: {error.filename or base} is not a folder; choose another {key}.")
    return ResourceError(
        f"{where}: cannot write to the folder {base}: {error.strerror or error}; "
        f"make it writable for this user or choose another {key}."
    )


def check(config: FolderSettings) -> list[str]:
    """The `AdapterType.check` of this type."""
    try:
        for part in ("", config.tmp_folder, folder.OWN_FOLDER):
            refuse_unwritable(os.path.join(config.folder, part))
    except OSError as error:
        raise _unwritable(config, error) from None
    return []
