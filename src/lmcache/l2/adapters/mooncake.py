"""`mooncake_store`: objects in a Mooncake Store, under their names (docs/formats/remote-names.md).

Frames go between L1 and the memory of other machines without a copy in between. The store does not list what it holds:
what other servers stored is found when it is asked for.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Container, Sequence
from typing import Any

from lmcache import _native
from lmcache.core.frame import holds_whole_frame
from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError, ConfigError
from lmcache.l2.adapter import Adapter, Capacity, Inventory
from lmcache.l2.adapters import mooncake_client
from lmcache.l2.adapters.mooncake_client import MooncakeClient, Range, Store
from lmcache.l2.adapters.mooncake_config import MooncakeConfig
from lmcache.l2.adapters.remote_names import RemoteNames
from lmcache.telemetry.log_limiter import LogLimiter

log = logging.getLogger("lmcache.l2")

COUNTED_NAMESPACES = 16  # by a question each when everything is deleted
MAX_SIZES = 1 << 16  # namespaces whose size of objects is remembered

_STORED = {
    0: StoreOutcome.STORED,
    mooncake_client.EXISTS: StoreOutcome.ALREADY_THERE,
    mooncake_client.NO_SPACE: StoreOutcome.FULL,
}
_ABSENT = (mooncake_client.MISSING, mooncake_client.NOT_READY)
_LOADED = (*_ABSENT, mooncake_client.TOO_SMALL)
_GONE = (0, mooncake_client.MISSING)


class MooncakeAdapter(Adapter):
    capacity = Capacity()

    def __init__(
        self,
        config: MooncakeConfig,
        make_store: Callable[[], Store] | None = None,
        late_seconds: float = mooncake_client.LATE_SECONDS,
    ) -> None:
        """`make_store`: what makes a client, in place of Mooncake's package."""
        self.capacity = Capacity(config.limit_bytes)
        self._config = config
        self._name = config.name
        self._names = RemoteNames(config.prefix)
        self._make_store = make_store
        self._late_seconds = late_seconds
        self._region: Range | None = None
        self._client: MooncakeClient | None = None
        self._sizes_bytes: dict[bytes, int] = {}  # of the last object seen, by its namespace's digest
        self._faults = LogLimiter()

    def status(self) -> dict[str, int]:
        return {"clients_replaced": self._client.replaced} if self._client is not None else {}

    def lend_memory(self, address: int, size_bytes: int) -> None:
        self._region = Range(address, size_bytes)

    async def open(self, inventory: Inventory) -> None:
        config = self._config
        if config.protocol == "rdma" and self._region is None:
            raise ConfigError(
                f'{config.where}: "protocol" "rdma" needs L1 as one range of memory, which nobody lent; use "tcp" here.'
            )
        if self._make_store is None:
            mooncake_client.refuse_missing_devices(config)
            self._make_store = mooncake_client.load_package(config.where)
        self._client = MooncakeClient(config, self._region, self._make_store, self._late_seconds)
        try:
            await self._client.open()
        except BaseException:
            await self.close()
            raise
        inventory.complete()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    # ---- objects -----------------------------------------------------------------------------------------------------
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        """What another server has stored meanwhile is not sent again."""
        sizes = await self.probe(keys)
        outcomes = [
            StoreOutcome.ALREADY_THERE if size == buffer.nbytes else StoreOutcome.FAILED
            for size, buffer in zip(sizes, buffers, strict=True)
        ]
        if others := [
            key
            for key, size, outcome in zip(keys, sizes, outcomes, strict=True)
            if size is not None and outcome is StoreOutcome.FAILED
        ]:
            await self.delete(others)  # Mooncake keeps what is there
        new = [index for index, outcome in enumerate(outcomes) if outcome is StoreOutcome.FAILED]
        if not new:
            return outcomes
        self._remember(keys, [buffer.nbytes for buffer in buffers])
        names = self._names.names([keys[index] for index in new])
        places = _places([buffers[index] for index in new])
        codes = await self._opened.transfer(lambda store: store.batch_put_from(names, *places), *places)
        for index, code in zip(new, _checked(codes, names), strict=True):
            outcomes[index] = _STORED.get(code, StoreOutcome.FAILED)
        self._look_at("store in", codes, _STORED)
        return outcomes

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        if not keys:
            return []
        names, places = self._names.names(keys), _places(buffers)
        codes = await self._opened.transfer(lambda store: store.batch_get_into(names, *places), *places)
        outcomes = [_loaded(code, buffer) for code, buffer in zip(_checked(codes, names), buffers, strict=True)]
        self._look_at("load from", [min(code, 0) for code in codes], (0, *_LOADED))
        if corrupt := [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is LoadOutcome.CORRUPT]:
            try:
                await self.delete(corrupt, corrupt=True)
            except AdapterError as error:
                log.debug("%s: corrupt objects could not be deleted: %s", self._name, error)
        return outcomes

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        if not keys:
            return []
        names = self._names.names(keys)
        codes, sizes = await self._opened.control(lambda store: _sizes(store, names))
        self._look_at("look up in", [min(code, 0) for code in codes], (0, *_ABSENT))
        if faults := [code for code in codes if code < 0 and code not in _ABSENT]:
            raise self._fault("look up in", faults[0])
        found = [sizes.get(name) for name in names]
        self._remember(keys, found)
        return found

    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        """By force: otherwise what somebody looked up stays for a while. Whoever reads it meanwhile sees that it does
        not verify."""
        if not keys:
            return []
        names = self._names.names(keys)
        codes = _checked(await self._opened.control(lambda store: store.batch_remove(names, True)), names)
        self._look_at("delete from", codes, _GONE)
        return [code in _GONE for code in codes]

    async def clear(self) -> tuple[int, int]:
        """Mooncake tells how many there were, not how large: each counts as the last one seen in its namespace, which
        is exact where nothing compresses them. It looks at all objects for each question, so that only some namespaces
        are counted by themselves; objects of the others count as their mean, and nothing where none was seen."""
        sizes_bytes = sorted(self._sizes_bytes.items(), key=lambda item: -item[1])
        objects = size_bytes = 0
        for digest, object_bytes in sizes_bytes[:COUNTED_NAMESPACES]:
            count = await self._remove_matching(f"{re.escape(self._names.folder(digest))}[0-9a-f]{{64}}")
            objects += count
            size_bytes += count * object_bytes
        others = [object_bytes for _, object_bytes in sizes_bytes[COUNTED_NAMESPACES:]]
        count = await self._remove_matching(f"{re.escape(self._names.root)}[0-9a-f]{{64}}/[0-9a-f]{{64}}")
        self._sizes_bytes.clear()
        return objects + count, size_bytes + (count * sum(others) // len(others) if others else 0)

    async def _remove_matching(self, pattern: str) -> int:
        count = await self._opened.control(lambda store: store.remove_by_regex(f"^{pattern}$", True))
        if count < 0:
            raise self._fault("delete from", count)
        return count

    # ---- what calls need ---------------------------------------------------------------------------------------------
    @property
    def _opened(self) -> MooncakeClient:
        if self._client is None:
            raise AdapterError(f"{self._name}: it is not open")
        return self._client

    def _remember(self, keys: Sequence[ObjectKey], sizes: Sequence[int | None]) -> None:
        for (namespace, _), size in zip(keys, sizes, strict=True):
            if size is not None and (namespace.digest in self._sizes_bytes or len(self._sizes_bytes) < MAX_SIZES):
                self._sizes_bytes[namespace.digest] = size

    def _look_at(self, act: str, codes: Sequence[int], expected: Container[int]) -> None:
        """Says a fault once. AdapterError where it concerns the whole call."""
        faults = [code for code in codes if code not in expected]
        if not faults:
            return
        error = self._fault(act, faults[0])
        if self._faults.due(faults[0]):
            log.warning("%s", error)
        if len(faults) == len(codes):
            raise error

    def _fault(self, act: str, code: int) -> AdapterError:
        reason = _REASONS.get(code, "see Mooncake's lines in the log")
        return AdapterError(f"{self._name}: cannot {act} Mooncake: fault {code} ({reason})", retryable=True)


_REASONS = {
    mooncake_client.TRANSFER_FAILED: "a machine that holds the object does not answer",
    -900: "the master does not answer",
    -901: "the master does not answer in time",
}


def _places(buffers: Sequence[memoryview]) -> tuple[list[int], list[int]]:
    """Addresses and sizes in bytes."""
    return [_native.buffer_address(buffer) for buffer in buffers], [buffer.nbytes for buffer in buffers]


def _checked(codes: Sequence[int], names: Sequence[str]) -> Sequence[int]:
    if len(codes) != len(names):
        raise AdapterError(f"Mooncake answered {len(codes)} of {len(names)} questions", retryable=True)
    return codes


def _loaded(code: int, buffer: memoryview) -> LoadOutcome:
    """`code`: bytes of the object, or a fault."""
    if code < 0:
        if code in _ABSENT:
            return LoadOutcome.MISSING
        return LoadOutcome.CORRUPT if code == mooncake_client.TOO_SMALL else LoadOutcome.FAILED
    if code == buffer.nbytes:
        return LoadOutcome.LOADED
    return LoadOutcome.LOADED if holds_whole_frame(buffer, code) else LoadOutcome.CORRUPT


def _sizes(store: Store, names: list[str]) -> tuple[Sequence[int], dict[str, int]]:
    """A code each, 0 or less for what is not there; and the sizes of those that are."""
    codes = _checked(store.batch_is_exist(names), names)
    stored = [name for name, code in zip(names, codes, strict=True) if code > 0]
    if not stored:
        return codes, {}
    sizes = {name: _size(replicas) for name, replicas in store.batch_get_replica_desc(stored).items()}
    for name in stored:  # on disks of other machines alone, whose replicas do not tell it; or the master is gone by now
        if sizes.get(name) is None:
            size = sizes[name] = store.get_size(name)
            if size < 0 and size not in _ABSENT:
                return [size] * len(names), {}
    return codes, {name: size for name, size in sizes.items() if size is not None and size >= 0}


def _size(replicas: Sequence[Any]) -> int | None:
    for replica in replicas:
        if replica.is_memory_replica():
            return int(replica.get_memory_descriptor().buffer_descriptor.size)
        if replica.is_disk_replica():
            return int(replica.get_disk_descriptor().object_size)
    return None


def check(config: MooncakeConfig) -> list[str]:
    """The `AdapterType.check` of this type. The services are asked by `open`."""
    mooncake_client.refuse_missing_devices(config)
    mooncake_client.load_package(config.where)
    return []
