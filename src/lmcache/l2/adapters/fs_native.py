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
from lmcache.core.folders import refuse_unwritable
from lmcache.core.key import ObjectKey
from lmcache.core.limits import FRAME_ALIGN_BYTES
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import ConfigError, ResourceError
from lmcache.l2.adapter import Capacity, Inventory
from lmcache.l2.adapters import folder
from lmcache.l2.adapters.engine_trial import (
    SMALLEST_CAPACITY_BYTES,
    TRIAL_BYTES,
    TRIAL_SECONDS,
    Trial,
    trial_paths,
    try_engines,
)
from lmcache.l2.adapters.writers import Writer
from lmcache.l2.background import in_thread, spawn
from lmcache.l2.completions import Results
from lmcache.l2.config import AdapterConfig
from lmcache.l2.keys import Key, choice, switch, text, text_or_empty, whole
from lmcache.l2.native_device import usable_queue_depth
from lmcache.l2.native_files import NativeFiles
from lmcache.telemetry.logs import level_of

log = logging.getLogger("lmcache.l2")

KEYS = (
    Key("base_path", text),
    Key("num_workers", whole(1, 1024), 4),
    Key("relative_tmp_dir", text_or_empty, ""),
    Key("use_odirect", switch, False),
    Key("read_ahead_size", whole(1, 1 << 40), None),
    Key("io_engine", choice(("auto", "posix", "io_uring")), "auto"),
)

WATCH_SECONDS = 30.0
WATCH_MAX_SECONDS = 300.0  # below writers.SILENT_SECONDS: watching is also how others know that this server lives
SCAN_SHARE = 50  # a scan is followed by this many times its duration without one
MAX_UNREMOVABLE = 65_536
INVENTORY_SLICE = 4096
UNLINK_SLICE = 4096
TAILS_RETRIED = 3

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_GONE = (0, errno.ENOENT, errno.ENOTDIR)
_THERE = (StoreOutcome.STORED, StoreOutcome.ALREADY_THERE)
_FOREIGN = {errno.EINVAL, errno.ELOOP, errno.EISDIR}


class FsNativeAdapter:
    verifies = True

    def __init__(self, config: AdapterConfig) -> None:
        settings = config.settings
        self.capacity = Capacity(config.capacity_bytes)
        self._name = config.name
        self._where = config.where
        self._base = os.path.abspath(settings["base_path"])
        self._tmp = _checked_tmp(settings["relative_tmp_dir"], config.where)
        self._threads: int = settings["num_workers"]
        self._use_odirect: bool = settings["use_odirect"]
        self._read_ahead_bytes: int = settings["read_ahead_size"] or 0
        self._engine: str = settings.get("io_engine", "posix")
        limit_bytes = config.capacity_bytes
        if self._engine == "auto" and limit_bytes is not None and limit_bytes < SMALLEST_CAPACITY_BYTES:
            self._engine = "posix"
        self._queue_depth = usable_queue_depth(self._engine, self._threads, config.name)
        self._stamps: dict[str, int] = {}
        self._base_bytes = folder.FOLDER_BYTES
        self._quarantined_bytes = 0
        self._nameless_bytes = 0  # files of namespaces that nobody can name, and their folders
        self._unremovable: set[ObjectKey] = set()  # corrupt, and the folder does not let them go
        self._said: set[int] = set()
        self._sequence = 0
        self._shared = False
        self._stopping = False
        self._said_buffered = False
        self._watcher: asyncio.Task[None] | None = None
        self._trial: asyncio.Task[Trial | None] | None = None

    def overhead_bytes(self) -> int:
        fixed = 5  # temporary files, .lmcache, its writers, this writer's file, quarantine
        trial_bytes = TRIAL_BYTES if self._engine == "auto" and self.capacity.limit_bytes is not None else 0
        other_bytes = self._quarantined_bytes + self._nameless_bytes + trial_bytes
        return self._base_bytes + fixed * folder.FOLDER_BYTES + other_bytes

    def status(self) -> dict[str, int]:
        if not self._watcher:
            return {}
        return {"buffered_fallbacks": self.buffered_fallbacks, "io_uring": int(self._queue_depth > 0)}

    @property
    def buffered_fallbacks(self) -> int:
        return self._writes.buffered_fallbacks + self._reads.buffered_fallbacks

    async def open(self, inventory: Inventory) -> None:
        try:
            self._writer = await in_thread("l2-open", self._prepare)
        except OSError as error:
            raise _unwritable(self._where, self._base, error) from None
        self.capacity = Capacity(
            self.capacity.limit_bytes,
            self._writer.unit_bytes(),
            folder.ENTRY_BYTES,
            folder_bytes=folder.FOLDER_BYTES + folder.ENTRY_BYTES,
            folders_of=folder.folders_of,
        )
        if self._engine == "auto":
            await self._choose_engine()
        # Lookups and loads have threads of their own: an engine waits for them, and nobody waits for stores.
        self._writes = self._files()
        self._reads = self._files()
        self._inventory = inventory
        self._watcher = spawn(self._watch(), f"{self._name}-watch")

    async def _choose_engine(self) -> None:
        """Does not wait longer than TRIAL_SECONDS."""
        loop = asyncio.get_running_loop()
        self._trial = loop.create_task(
            in_thread("l2-trial", try_engines, self._trial_paths, self._threads, self._use_odirect)
        )
        done, _ = await asyncio.wait({self._trial}, timeout=TRIAL_SECONDS)
        trial = self._trial.result() if done else None
        self._queue_depth = self._threads if trial is not None and trial.prefers_ring else 0
        measured = "no trial within its time, or io_uring is refused"
        if trial is not None:
            threads, ring = (" ".join(f"{seconds * 1e3:.1f}" for seconds in it) for it in (trial.threads, trial.ring))
            measured = f"trial: threads {threads} ms, io_uring {ring} ms"
        log.info(
            "%s: %s the files (%s)", self._name, "io_uring moves" if self._queue_depth else "threads move", measured
        )

    async def _end_trial(self) -> None:
        """A late one is waited for: what it still writes must go, too."""
        if self._trial is not None:
            await asyncio.wait({self._trial})
            self._trial = None
            await self._unlink(self._trial_paths)

    @property
    def _trial_paths(self) -> list[str]:
        return trial_paths(f"{self._base}/{folder.OWN_FOLDER}", self._writer.id)

    def _files(self) -> NativeFiles:
        return NativeFiles(
            self._threads,
            use_odirect=self._use_odirect,
            block_bytes=FRAME_ALIGN_BYTES,
            read_ahead_bytes=self._read_ahead_bytes,
            queue_depth=self._queue_depth,
        )

    def _prepare(self) -> Writer:
        os.makedirs(self._base, mode=folder.FOLDER_MODE, exist_ok=True)
        temporary = folder.make(self._base, self._tmp)
        writer = Writer(self._base)
        try:
            # Both folders must take files, and be one file system: publishing is a rename.
            trial = os.path.join(temporary, f"{writer.id}.0.tmp")
            os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o660))
            target = os.path.join(self._base, folder.OWN_FOLDER, f"{writer.id}.trial")
            try:
                os.rename(trial, target)
            except OSError:
                os.unlink(trial)
                raise
            os.unlink(target)
            # Without the right to list it, nothing could be recovered or evicted.
            os.listdir(self._base)
        except OSError:
            writer.close()
            raise
        return writer

    # ---- objects -----------------------------------------------------------------------------------------------------
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        outcomes = [StoreOutcome.FAILED] * len(keys)
        todo = list(range(len(keys)))
        if self._shared:
            sizes = await self.probe(keys)
            there = [index for index in todo if sizes[index] == buffers[index].nbytes]
            for index in there:
                outcomes[index] = StoreOutcome.ALREADY_THERE
            todo = [index for index in todo if outcomes[index] is StoreOutcome.FAILED]
        paths = [self._path(key) for key in keys]
        for _ in range(1 + TAILS_RETRIED):
            if not todo:
                break
            written, errors = await self._writes.write(
                [paths[index] for index in todo],
                [self._temporary(paths[index]) for index in todo],
                [buffers[index] for index in todo],
            )
            self._note_fallbacks()
            stored = sum(1 for result in written if result >= 0)
            for index in todo[:stored]:
                outcomes[index] = StoreOutcome.STORED
            if stored == len(todo):
                self._said.clear()
                break
            fault = next((error for error in errors if error not in (0, errno.ECANCELED)), errno.EIO)
            if fault in _NO_ROOM:
                for index in todo[stored:]:
                    outcomes[index] = StoreOutcome.FULL
                break
            self._say(fault, "write", paths[todo[stored]])
            # What follows the one that failed was not written, so that no batch leaves a hole unasked.
            todo = todo[stored + 1 :]
        if todo or StoreOutcome.FAILED in outcomes:
            await self._remove_empty(
                [path for path, outcome in zip(paths, outcomes, strict=True) if outcome not in _THERE]
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
            there = error == 0 and key not in self._unremovable
            found.append(size if there else None)
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
        digests = [namespace.digest_hex for namespace in contents.namespaces]
        paths = [
            folder.object_path(self._base, digests[owner], contents.hash_of(index).hex())
            for index, owner in enumerate(contents.owners)
        ]
        errors = await self._unlink(paths)
        await self._remove_empty(paths)
        await in_thread("l2-clear", folder.remove_empty, self._base, contents.empty)
        left = [index for index, error in enumerate(errors) if error not in _GONE]
        self._quarantined_bytes = await in_thread("l2-clear", self._quarantined)
        self._nameless_bytes = self._nameless(contents, left)
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
        await in_thread("l2-close", self._writer.close)

    # ---- names -------------------------------------------------------------------------------------------------------
    def _path(self, key: ObjectKey) -> str:
        return folder.object_path(self._base, key.namespace.digest.hex(), key.chunk_hash.hex())

    def _temporary(self, path: str) -> str:
        self._sequence += 1
        name = f"{self._writer.id}.{self._sequence}.tmp"
        if self._tmp:
            return f"{self._base}/{self._tmp}/{name}"
        parent, _, file = path.rpartition("/")
        return f"{parent}/.{file[:64]}.{name}"

    # ---- faults ------------------------------------------------------------------------------------------------------
    def _say(self, error: int, act: str, path: str) -> None:
        """One line for each kind of fault until a store succeeds again."""
        if error not in self._said:
            self._said.add(error)
            log.warning("%s: cannot %s %s: %s (errno %d)", self._name, act, path, os.strerror(error), error)

    def _note_fallbacks(self) -> None:
        if not self._said_buffered and self.buffered_fallbacks:
            self._said_buffered = True
            log.warning(
                "%s: O_DIRECT is not possible for some operations in %s; these go through the page cache. "
                "Sizes or addresses do not fit the file system: see --chunk-size and --l1-align-bytes.",
                self._name,
                self._base,
            )

    async def _quarantine(self, keys: Sequence[ObjectKey]) -> list[bool]:
        def move() -> tuple[list[bool], int]:
            names = [(key.namespace.digest.hex(), key.chunk_hash.hex()) for key in keys]
            return [folder.quarantine(self._base, *name) for name in names], self._quarantined()

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
            results: Results = await self._writes.unlink(paths[start : start + UNLINK_SLICE])
            errors.extend(results[1])
        return errors

    async def _remove_empty(self, paths: Sequence[str]) -> None:
        """The folders of these files, where nothing is left in them."""
        folders = list({os.path.dirname(path) for path in paths})
        for start in range(0, len(folders), UNLINK_SLICE):
            await self._writes.remove_empty(folders[start : start + UNLINK_SLICE])

    # ---- what the folder holds ---------------------------------------------------------------------------------------
    def _is_stopping(self) -> bool:
        return self._stopping

    async def _watch(self) -> None:
        """Scans once, then again as long as other servers write here too; alone, looks for what somebody removed."""
        await self._end_trial()
        scan_seconds = await self._scan_or_say()
        self._inventory.complete()
        while True:
            await asyncio.sleep(min(max(WATCH_SECONDS, SCAN_SHARE * scan_seconds), WATCH_MAX_SECONDS))
            before = self._shared
            try:
                self._shared = bool(await in_thread("l2-watch", self._writer.others))
            except OSError as error:
                self._say(error.errno or errno.EIO, "search", self._base)
            if self._shared or before:
                scan_seconds = await self._scan_or_say()
            else:
                await self._notice_deletions()

    async def _scan_or_say(self) -> float:
        """How long it took."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            await self._scan()
        except Exception as error:  # the root of a task: the adapter serves without an inventory, by stat
            log.log(level_of(error), "%s: the folder %s could not be searched", self._name, self._base, exc_info=True)
        return loop.time() - started

    async def _scan(self) -> None:
        known = self._inventory.known()
        contents, order, quarantined, others = await in_thread("l2-scan", self._search)
        self._shared = bool(others)
        for fault in contents.faults[:1]:
            log.warning("%s: %d folders could not be searched, the first: %s", self._name, len(contents.faults), fault)
        owners = [namespace.namespace for namespace in contents.namespaces]
        self._quarantined_bytes = quarantined
        self._nameless_bytes = self._nameless(contents, range(len(contents.sizes)))
        seen: set[ObjectKey] = set()
        for start in range(0, len(order), INVENTORY_SLICE):
            objects = []
            for index in order[start : start + INVENTORY_SLICE]:
                owner = owners[contents.owners[index]]
                if owner is not None:
                    objects.append((ObjectKey(owner, contents.hash_of(index)), contents.sizes[index]))
            self._inventory.found(objects)
            if known:
                seen.update(key for key, _ in objects)
            await asyncio.sleep(0)
        await self._report_lost(known, seen)

    def _nameless(self, contents: folder.Contents, indices: Sequence[int]) -> int:
        """What those of the objects are charged, with their folders, that no key can be told of."""
        nameless = {position for position, found in enumerate(contents.namespaces) if found.namespace is None}
        if not nameless:
            return 0
        found = [index for index in indices if contents.owners[index] in nameless]
        owners = {contents.owners[index] for index in found}
        fan_outs = {(contents.owners[index], contents.hash_of(index)[0]) for index in found}
        return sum(self.capacity.charge(contents.sizes[index]) for index in found) + self.capacity.folder_bytes * (
            len(owners) + len(fan_outs)
        )

    def _search(self) -> tuple[folder.Contents, array[int], int, set[str]]:
        """What is there, in which order it was used, the bytes in quarantine, other live writers."""
        contents = folder.scan(self._base, self._tmp, self._is_stopping)
        # In this order: a writer that lives now may have written what the scan saw, a dead one will write no more.
        others = self._writer.others()
        live = {self._writer.id, *others}
        folder.remove_temporary(self._base, [path for path, writer in contents.temporary if writer not in live])
        folder.remove_empty(self._base, contents.empty)
        self._base_bytes = folder.base_bytes(self._base)
        order = array("I", _native.youngest_first(memoryview(contents.used_ns)))
        return contents, order, folder.trim_quarantine(self._base), others

    async def _notice_deletions(self) -> None:
        """Looks for known files in the folders that changed since the last time, or that are not there."""
        stamps, self._base_bytes = await in_thread("l2-watch", self._look)
        same = {name for name, stamp in stamps.items() if self._stamps.get(name) == stamp}
        has_changed = not stamps or stamps != self._stamps
        self._stamps = stamps
        known = self._inventory.known() if has_changed else []
        for start in range(0, len(known), INVENTORY_SLICE):
            part = known[start : start + INVENTORY_SLICE]
            await self._report_lost([key for key in part if self._folder_of(key) not in same], set())
            await asyncio.sleep(0)

    def _look(self) -> tuple[dict[str, int], int]:
        try:
            return folder.stamps(self._base), folder.base_bytes(self._base)
        except OSError:  # it is gone
            return {}, self._base_bytes

    def _folder_of(self, key: ObjectKey) -> str:
        return folder.object_folder(key.namespace.digest.hex(), key.chunk_hash.hex())

    async def _report_lost(self, known: Sequence[ObjectKey], found: set[ObjectKey]) -> None:
        missing = [key for key in known if key not in found]
        for start in range(0, len(missing), INVENTORY_SLICE):
            part = missing[start : start + INVENTORY_SLICE]  # asked again: it may have been stored during the scan
            sizes = await self.probe(part)
            self._inventory.lost([key for key, size in zip(part, sizes, strict=True) if size is None])


def _checked_tmp(relative: str, where: str) -> str:
    """Inside the folder and not where objects or our own files are."""
    normal = os.path.normpath(relative) if relative else ""
    parts = normal.split(os.sep)
    reserved = {folder.OWN_FOLDER, folder.QUARANTINE}
    if os.path.isabs(normal) or ".." in parts or parts[0] in reserved or len(parts) > 2:
        raise ConfigError(
            f'{where}: "relative_tmp_dir" must name a folder inside base_path, at most two deep, other than '
            f"{' and '.join(sorted(reserved))}; got {relative!r}."
        )
    return "" if normal == "." else normal


def _unwritable(where: str, base: str, error: OSError) -> ResourceError:
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return ResourceError(f"{where}: {error.filename or base} is not a folder; choose another base_path.")
    return ResourceError(
        f"{where}: cannot write to the folder {base}: {error.strerror or error}; "
        "make it writable for this user or choose another base_path."
    )


def check(config: AdapterConfig) -> list[str]:
    """As `AdapterType.check`."""
    base = os.path.abspath(config.settings["base_path"])
    try:
        refuse_unwritable(base)
        for part in (_checked_tmp(config.settings["relative_tmp_dir"], config.where), folder.OWN_FOLDER):
            refuse_unwritable(os.path.join(base, part))
    except OSError as error:
        raise _unwritable(config.where, base, error) from None
    return []


def build(config: AdapterConfig) -> FsNativeAdapter:
    return FsNativeAdapter(config)
