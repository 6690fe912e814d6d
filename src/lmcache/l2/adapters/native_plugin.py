"""`native_plugin`: an object from outside, usually compiled, that takes batches and signals completions by an eventfd.

    event_fd() -> int                          readable when drain_completions() has something
    submit_batch_set(keys, buffers) -> id      keys: str, 129 characters out of 0-9a-f and one "_"
    submit_batch_get(keys, buffers) -> id      buffers: memoryviews, lent until the batch is reported
    submit_batch_exists(keys) -> id
    submit_batch_delete(keys) -> id            may be missing
    drain_completions() -> [(id, ok, error, one bool a key or None)]
    close()

None of them may block. Everything is called from one thread. Where a batch reports bools they decide for each key;
where not, `ok` decides for all of them.

Invariant: lent buffers go back when their batch has been reported, or when close() has returned, and never before that,
whatever else goes wrong: the client's own threads may write into them. Who waits is told so by the deadline.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lmcache.core.frame import holds_whole_frame
from lmcache.core.key import ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError, ResourceError
from lmcache.l2.adapter import Capacity, Inventory
from lmcache.l2.adapters import outside
from lmcache.l2.background import in_thread
from lmcache.l2.config import AdapterConfig
from lmcache.l2.keys import Key, mapping, text

log = logging.getLogger("lmcache.l2")

KEYS = (Key("module_path", text), Key("class_name", text), Key("adapter_params", mapping, {}))

METHODS = ("event_fd", "submit_batch_get", "submit_batch_set", "submit_batch_exists", "drain_completions", "close")
MAX_UNREADABLE = 65_536
DRAIN_RETRY_SECONDS = 0.25


class Completion(NamedTuple):
    ok: bool
    error: str
    each: list[bool]


class Batch(NamedTuple):
    keys: int
    lends: bool  # buffers
    future: asyncio.Future[Completion]

    def fail(self, error: AdapterError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


def name_of(key: ObjectKey) -> str:
    """The whole key, in characters that any backend takes."""
    return f"{key.namespace.digest.hex()}_{key.chunk_hash.hex()}"


class NativePluginAdapter:
    def __init__(self, config: AdapterConfig) -> None:
        settings = config.settings
        self.capacity = Capacity(config.capacity_bytes)
        self._where = config.where
        self._settings = settings
        self._module = outside.import_module(f'{config.where}: "module_path"', settings["module_path"])
        self._must_delete = config.eviction is not None or not config.persist
        self._name = config.name
        self._client: Any = None
        self._fd = -1
        self._waiting: dict[int, Batch] = {}
        self._unknown: list[Batch] = []  # whose report could not be told from another's: until close
        self._drain_fails = False
        self._sizes: dict[ObjectKey, int] = {}  # of what was stored or loaded here
        self._frame_bytes: dict[bytes, int] = {}  # by namespace: objects of one have one size
        self._unreadable: set[ObjectKey] = set()  # corrupt, where nothing can be deleted

    def overhead_bytes(self) -> int:
        return 0

    def status(self) -> dict[str, int]:
        return {}

    async def open(self, inventory: Inventory) -> None:
        def connect() -> Any:
            client = outside.construct(
                self._where, self._module, self._settings["class_name"], self._settings["adapter_params"], ""
            )
            needed = (*METHODS, "submit_batch_delete") if self._must_delete else METHODS
            outside.need_methods(self._where, client, needed, "docs/how-to/write-an-adapter.md")
            return client

        self._client = await in_thread("l2-open", connect)
        fd = self._client.event_fd()
        try:
            asyncio.get_running_loop().add_reader(fd, self._collect)
        except (OSError, ValueError, TypeError) as error:
            raise ResourceError(
                f"{self._where}: event_fd() of {self._settings['class_name']} gave {fd!r}, which cannot be waited on "
                f"({error}); it must be an open eventfd."
            ) from None
        self._fd = fd
        inventory.complete()

    # ---- objects -----------------------------------------------------------------------------------------------------
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        done = await self._submit("set", keys, buffers)
        outcomes = []
        for key, buffer, stored in zip(keys, buffers, done.each, strict=True):
            outcomes.append(StoreOutcome.STORED if stored else StoreOutcome.FAILED)
            if stored:
                self._note(key, buffer.nbytes)
                self._unreadable.discard(key)
        if not any(done.each) and done.error:
            raise AdapterError(done.error, retryable=True)
        return outcomes

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        outcomes = [LoadOutcome.MISSING] * len(keys)
        there = await self._exist(keys)
        wanted = [index for index, found in enumerate(there) if found]
        if not wanted:
            return outcomes
        done = await self._submit("get", [keys[i] for i in wanted], [buffers[i] for i in wanted])
        corrupt = []
        for index, loaded in zip(wanted, done.each, strict=True):
            if not loaded:
                outcomes[index] = LoadOutcome.FAILED
            elif holds_whole_frame(buffers[index], buffers[index].nbytes):
                outcomes[index] = LoadOutcome.LOADED
                self._note(keys[index], self._sizes.get(keys[index], buffers[index].nbytes))
            else:
                outcomes[index] = LoadOutcome.CORRUPT
                corrupt.append(keys[index])
        if corrupt:
            await self.delete(corrupt, corrupt=True)
        if not any(done.each) and done.error:
            raise AdapterError(done.error, retryable=True)
        return outcomes

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """The backend is not asked for sizes: those of objects stored elsewhere are taken from others of their
        namespace, and before one is known a header's size stands in."""
        there = await self._exist(keys)
        return [self._size(key) if found else None for key, found in zip(keys, there, strict=True)]

    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        if self._deletes:
            await self._submit("delete", keys)
        there = await self._exist(keys)
        gone = [not found for found in there]
        for key, is_gone in zip(keys, gone, strict=True):
            if is_gone:
                self._sizes.pop(key, None)
            elif corrupt:
                if len(self._unreadable) >= MAX_UNREADABLE:
                    self._unreadable.clear()
                self._unreadable.add(key)
        return gone

    async def clear(self) -> tuple[int, int]:
        """What this server stored or loaded: the interface has no way to list the rest."""
        if not self._deletes:
            raise AdapterError(f"{self._name}: {type(self._client).__name__} has no submit_batch_delete")
        sizes = dict(self._sizes)
        gone = await self.delete(list(sizes))
        cleared = [size for size, is_gone in zip(sizes.values(), gone, strict=True) if is_gone]
        return len(cleared), sum(cleared)

    async def close(self) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._fd = -1
        client, self._client = self._client, None
        if client is not None:
            await in_thread("l2-close", client.close)
        for batch in [*self._waiting.values(), *self._unknown]:
            batch.fail(AdapterError(f"{self._name}: closed"))
        self._waiting.clear()
        self._unknown.clear()

    # ---- batches -----------------------------------------------------------------------------------------------------
    @property
    def _deletes(self) -> bool:
        return callable(getattr(self._client, "submit_batch_delete", None))

    async def _exist(self, keys: Sequence[ObjectKey]) -> list[bool]:
        done = await self._submit("exists", keys)
        if not done.ok:
            raise AdapterError(done.error or "a lookup failed", retryable=True)
        return [there and key not in self._unreadable for key, there in zip(keys, done.each, strict=True)]

    async def _submit(self, act: str, keys: Sequence[ObjectKey], *buffers: Sequence[memoryview]) -> Completion:
        if not keys:
            return Completion(True, "", [])
        submit: Callable[..., int] = getattr(self._client, f"submit_batch_{act}")
        number = submit([name_of(key) for key in keys], *(list(some) for some in buffers))
        batch = Batch(len(keys), bool(buffers), asyncio.get_running_loop().create_future())
        if isinstance(number, int) and number not in self._waiting:
            self._waiting[number] = batch
        else:
            log.error("%s: submit_batch_%s gave the number %r, which must be a new one", self._name, act, number)
            self._unknown.append(batch)
            if isinstance(number, int):
                self._unknown.append(self._waiting.pop(number))
        return await batch.future

    def _collect(self) -> None:
        """Runs when the descriptor is readable. Some objects reset it in drain_completions, others leave that to us."""
        try:
            if not self._drain() and select.select([self._fd], [], [], 0)[0]:
                os.read(self._fd, 8)
                self._drain()  # what was reported between the two
        except Exception as error:  # code from outside, called by the loop: nobody else would hear of it
            self._pause(error)
        else:
            self._drain_fails = False

    def _pause(self, error: Exception) -> None:
        """The descriptor may stay readable: to be called at once for ever would be of no use."""
        if not self._drain_fails:
            self._drain_fails = True
            log.exception("%s: drain_completions failed; it is tried again every %g s", self._name, DRAIN_RETRY_SECONDS)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._fd)
        loop.call_later(DRAIN_RETRY_SECONDS, self._resume)
        for number in [number for number, batch in self._waiting.items() if not batch.lends]:
            self._waiting.pop(number).fail(AdapterError(f"{self._name}: drain_completions failed: {error}"))

    def _resume(self) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().add_reader(self._fd, self._collect)
            self._collect()  # the descriptor may have been reset before it failed

    def _drain(self) -> int:
        reports = list(self._client.drain_completions())
        for report in reports:
            if not isinstance(report, tuple | list) or not report or not isinstance(report[0], int):
                log.error("%s: drain_completions gave %.200r, which names no batch", self._name, report)
                continue
            batch = self._waiting.pop(report[0], None)
            if batch is None or batch.future.done():
                continue
            try:
                batch.future.set_result(_completion(report, batch.keys))
            except Exception as error:  # values from outside may raise anything; it has been reported all the same
                batch.fail(AdapterError(f"{self._name}: reported {report!r:.200} for {batch.keys} keys: {error}"))
        return len(reports)

    def _note(self, key: ObjectKey, size_bytes: int) -> None:
        self._sizes[key] = size_bytes
        self._frame_bytes[key.namespace.digest] = size_bytes

    def _size(self, key: ObjectKey) -> int:
        return self._sizes.get(key) or self._frame_bytes.get(key.namespace.digest, FRAME_HEADER_BYTES)


def check(config: AdapterConfig) -> list[str]:
    """As `AdapterType.check`. The object itself is made by `open`: it may connect."""
    module = outside.import_module(config.where, config.settings["module_path"])
    outside.attribute(config.where, module, "class_name", config.settings["class_name"])
    return []


def _completion(report: Sequence[Any], count: int) -> Completion:
    """Raises where it is not (number, ok, error, one bool a key or None)."""
    _, ok, error, each = report
    if each is not None and len(each) == count:
        results = [bool(result) for result in each]
    elif each is None or not ok:
        results = [bool(ok)] * count
    else:
        raise ValueError(f"{len(each)} results")
    return Completion(bool(ok), str(error or ""), results)


def build(config: AdapterConfig) -> NativePluginAdapter:
    return NativePluginAdapter(config)
