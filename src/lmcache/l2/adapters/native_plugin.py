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
whatever else goes wrong: the client's own threads may write into them. The deadline ends the wait of the caller.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from lmcache.core import limits
from lmcache.core.frame import holds_whole_frame
from lmcache.core.key import ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError, ResourceError
from lmcache.l2.adapter import Adapter, Capacity, Inventory
from lmcache.l2.adapters import plugin_loader
from lmcache.l2.adapters.plugin import GUIDE, OutsideConfig
from lmcache.l2.background import in_thread

log = logging.getLogger("lmcache.l2")

METHODS = ("event_fd", "submit_batch_get", "submit_batch_set", "submit_batch_exists", "drain_completions", "close")
DRAIN_RETRY_SECONDS = 0.25
_CLEAR_OBJECTS = 4096  # that are deleted at a time


class NativePluginConfig(OutsideConfig, frozen=True, kw_only=True):
    """A compiled client of your own, with an eventfd, as docs/how-to/write-an-adapter.md describes."""


class Completion(NamedTuple):
    ok: bool
    error: str
    results: list[bool]  # of each key

    def raise_if_all_failed(self) -> None:
        if not any(self.results) and self.error:
            raise AdapterError(self.error, retryable=True)


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


class NativePluginAdapter(Adapter):
    capacity = Capacity()

    def __init__(self, config: NativePluginConfig) -> None:
        self.capacity = Capacity(config.limit_bytes)
        self._config = config
        self._where = config.where
        self._module = plugin_loader.import_module(f'{config.where}: "module_path"', config.module_path)
        self._must_delete = config.eviction is not None or not config.persist_enabled
        self._name = config.name
        self._inventory: Inventory | None = None
        self.client: Any = None
        self._fd = -1
        self._waiting: dict[int, Batch] = {}
        self._unknown: list[Batch] = []  # whose report cannot be distinguished from another's: until close
        self._drain_fails = False
        self._sizes: OrderedDict[ObjectKey, int] = OrderedDict()  # of what was stored or loaded here last
        self._frame_bytes: OrderedDict[bytes, int] = OrderedDict()  # by namespace: objects of one have about one size
        self._unreadable: set[ObjectKey] = set()  # corrupt, where nothing can be deleted

    async def open(self, inventory: Inventory) -> None:
        def connect() -> Any:
            client = plugin_loader.construct(
                self._where, self._module, self._config.class_name, self._config.adapter_params, ""
            )
            needed = (*METHODS, "submit_batch_delete") if self._must_delete else METHODS
            plugin_loader.need_methods(self._where, client, needed, GUIDE)
            return client

        self.client = await in_thread("l2-open", connect)
        fd = self.client.event_fd()
        try:
            asyncio.get_running_loop().add_reader(fd, self._collect)
        except (OSError, ValueError, TypeError) as error:
            raise ResourceError(
                f"{self._where}: event_fd() of {self._config.class_name} gave {fd!r}, which cannot be waited on "
                f"({error}); it must be an open eventfd."
            ) from None
        self._fd = fd
        self._inventory = inventory
        inventory.complete()

    # ---- objects -----------------------------------------------------------------------------------------------------
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        completion = await self._submit("set", keys, buffers)
        outcomes = []
        for key, buffer, stored in zip(keys, buffers, completion.results, strict=True):
            outcomes.append(StoreOutcome.STORED if stored else StoreOutcome.FAILED)
            if stored:
                self._remember_size(key, buffer.nbytes)
                self._unreadable.discard(key)
        completion.raise_if_all_failed()
        return outcomes

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        outcomes = [LoadOutcome.MISSING] * len(keys)
        existing = [index for index, exists in enumerate(await self._exist(keys)) if exists]
        if not existing:
            return outcomes
        completion = await self._submit("get", [keys[i] for i in existing], [buffers[i] for i in existing])
        corrupt = []
        for index, loaded in zip(existing, completion.results, strict=True):
            if not loaded:
                outcomes[index] = LoadOutcome.FAILED
            elif holds_whole_frame(buffers[index], buffers[index].nbytes):
                outcomes[index] = LoadOutcome.LOADED
                self._remember_size(keys[index], self._sizes.get(keys[index], buffers[index].nbytes))
            else:
                outcomes[index] = LoadOutcome.CORRUPT
                corrupt.append(keys[index])
        if corrupt:
            await self.delete(corrupt, corrupt=True)
        completion.raise_if_all_failed()
        return outcomes

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """The backend is not asked for sizes: those of objects stored elsewhere are taken from others of their
        namespace, and before one is known a header's size stands in."""
        return [self._size(key) if exists else None for key, exists in zip(keys, await self._exist(keys), strict=True)]

    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        if self._deletes:
            await self._submit("delete", keys)
        gone = [not exists for exists in await self._exist(keys)]
        for key, is_gone in zip(keys, gone, strict=True):
            if corrupt and not is_gone:
                if len(self._unreadable) >= limits.MAX_L2_UNREADABLE_OBJECTS:
                    self._unreadable.clear()
                self._unreadable.add(key)
        return gone

    async def clear(self) -> tuple[int, int]:
        """What this server knows of: the interface has no way to list the rest."""
        if not self._deletes:
            raise AdapterError(f"{self._name}: {type(self.client).__name__} has no submit_batch_delete")
        objects = size_bytes = 0
        for keys in self._known_pages():
            sizes = list(map(self._size, keys))
            cleared = [size for size, is_gone in zip(sizes, await self.delete(keys), strict=True) if is_gone]
            objects, size_bytes = objects + len(cleared), size_bytes + sum(cleared)
        return objects, size_bytes

    def _known_pages(self) -> Iterator[list[ObjectKey]]:
        if self._inventory is not None:
            yield from self._inventory.known()
        remembered = list(self._sizes)  # without those that were deleted meanwhile
        for start in range(0, len(remembered), _CLEAR_OBJECTS):
            yield remembered[start : start + _CLEAR_OBJECTS]

    async def close(self) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._fd = -1
        client, self.client = self.client, None
        if client is not None:
            await in_thread("l2-close", client.close)
        for batch in [*self._waiting.values(), *self._unknown]:
            batch.fail(AdapterError(f"{self._name}: closed"))
        self._waiting.clear()
        self._unknown.clear()

    # ---- batches -----------------------------------------------------------------------------------------------------
    @property
    def _deletes(self) -> bool:
        return callable(getattr(self.client, "submit_batch_delete", None))

    async def _exist(self, keys: Sequence[ObjectKey]) -> list[bool]:
        completion = await self._submit("exists", keys)
        if not completion.ok:
            raise AdapterError(completion.error or "a lookup failed", retryable=True)
        for key, exists in zip(keys, completion.results, strict=True):
            if not exists:
                self._sizes.pop(key, None)  # also where the backend evicts by itself
        return [exists and key not in self._unreadable for key, exists in zip(keys, completion.results, strict=True)]

    async def _submit(self, operation: str, keys: Sequence[ObjectKey], *buffers: Sequence[memoryview]) -> Completion:
        if not keys:
            return Completion(True, "", [])
        submit: Callable[..., int] = getattr(self.client, f"submit_batch_{operation}")
        number = submit([name_of(key) for key in keys], *map(list, buffers))
        batch = Batch(len(keys), bool(buffers), asyncio.get_running_loop().create_future())
        if isinstance(number, int) and number not in self._waiting:
            self._waiting[number] = batch
        else:
            log.error("%s: submit_batch_%s gave the number %r, which must be a new one", self._name, operation, number)
            self._unknown.append(batch)
            if isinstance(number, int):
                self._unknown.append(self._waiting.pop(number))
        return await batch.future

    def _collect(self) -> None:
        """Runs when the descriptor is readable. Some clients reset it in drain_completions, others leave that to us."""
        try:
            if not self._drain() and select.select([self._fd], [], [], 0)[0]:
                os.read(self._fd, 8)
                self._drain()  # reports that came between drain and reset
        except Exception as error:  # code from outside, called by the loop: nobody else would hear of it
            self._pause(error)
        else:
            self._drain_fails = False

    def _pause(self, error: Exception) -> None:
        """Stops watching the descriptor, which may stay readable, for a while."""
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
        reports = list(self.client.drain_completions())
        for report in reports:
            if not isinstance(report, tuple | list) or not report or not isinstance(report[0], int):
                log.error("%s: drain_completions gave %.200r, which names no batch", self._name, report)
                continue
            batch = self._waiting.pop(report[0], None)
            if batch is None or batch.future.done():
                continue
            try:
                batch.future.set_result(_completion(report, batch.keys))
            except Exception as error:  # values from outside may raise anything; the batch has ended all the same
                batch.fail(AdapterError(f"{self._name}: reported {report!r:.200} for {batch.keys} keys: {error}"))
        return len(reports)

    def _remember_size(self, key: ObjectKey, size_bytes: int) -> None:
        _remember(self._sizes, key, size_bytes, limits.MAX_L2_SIZES_REMEMBERED)
        _remember(self._frame_bytes, key.namespace.digest, size_bytes, limits.MAX_NAMESPACES_REMEMBERED)

    def _size(self, key: ObjectKey) -> int:
        return self._sizes.get(key) or self._frame_bytes.get(key.namespace.digest, FRAME_HEADER_BYTES)


def _remember(sizes: OrderedDict[Any, int], name: Any, size_bytes: int, most: int) -> None:
    sizes[name] = size_bytes
    sizes.move_to_end(name)
    if len(sizes) > most:
        sizes.popitem(last=False)


def check(config: NativePluginConfig) -> list[str]:
    """The `AdapterType.check` of this type. The object itself is made by `open`: it may connect."""
    module = plugin_loader.import_module(config.where, config.module_path)
    plugin_loader.attribute(config.where, module, "class_name", config.class_name)
    return []


def _completion(report: Sequence[Any], count: int) -> Completion:
    """Raises where `report` is not (number, ok, error, one bool a key or None)."""
    _, ok, error, results = report
    if results is None or (not ok and len(results) != count):
        results = [ok] * count
    if len(results) != count:
        raise ValueError(f"{len(results)} results")
    return Completion(bool(ok), str(error or ""), list(map(bool, results)))
