"""Redis and Valkey: an object is a value under its own name (docs/formats/resp.md, docs/formats/remote-names.md).

Frames go from and to L1 on native threads (native/include/lmcache/resp_client.h). Lookups have connections of their
own, so that they never wait behind a frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Awaitable, Callable, Container, Sequence

from lmcache.clock import wall_ns
from lmcache.core.key import ObjectKey
from lmcache.core.limits import MAX_L2_LISTED_OBJECTS
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.environment import SYSTEM, Environment
from lmcache.errors import AdapterError, ConfigError, ResourceError
from lmcache.l2.adapter import Adapter, Capacity, Inventory
from lmcache.l2.adapters.resp_config import MAX_VALUE_BYTES, MIN_VALUE_BYTES, RespConfig, client_options
from lmcache.l2.adapters.resp_inventory import Objects, ScanCursor, namespaces_of
from lmcache.l2.adapters.resp_servers import Servers, find_servers, make_client
from lmcache.l2.adapters.scan_order import MAX_TIME_NS
from lmcache.l2.background import in_thread, spawn
from lmcache.l2.completions import IoResults
from lmcache.l2.native_resp import NativeResp, Page, pack
from lmcache.telemetry.log_limiter import LogLimiter
from lmcache.telemetry.logs import level_of

log = logging.getLogger("lmcache.l2")

CONTROL_THREADS = 2
# Beside its value an object takes its name, the server's record of it and what the allocator rounds them up to.
OBJECT_OVERHEAD_BYTES = 320
LOG_SECONDS = 60.0  # while one server of several is away, calls that fail and calls that do not alternate
MAX_PARTS = 4096  # RespManifest::kMaxParts
INVENTORY_SLICE = 4096
WATCH_SECONDS = 60.0
WATCH_MAX_SECONDS = 1800.0
ORPHANS_SECONDS = 3600.0  # between two searches for parts that belong to no object
IDLE_TIME_NS = 10**9  # in which the servers tell the time of use
SCAN_SHARE = 50  # the pause after a scan, in multiples of its duration
CLEAR_ATTEMPTS = 3  # where its servers change meanwhile
SEARCH_PAUSE_SECONDS = 0.5  # before the servers are looked for again


class RespAdapter(Adapter):
    capacity = Capacity()
    verifies = True

    def __init__(self, config: RespConfig, environment: Environment = SYSTEM) -> None:
        self.capacity = self._capacity(config, config.max_value_bytes)
        self._config = config
        self._clock = environment.clock
        self._name = config.name
        self._servers = Servers([], [])
        self._clients: tuple[NativeResp, ...] = ()
        self._watcher: asyncio.Task[None] | None = None
        self._search: asyncio.Task[None] | None = None
        self._finding = asyncio.Lock()
        self._changes_seen = 0
        self._searched_until_ns = MAX_TIME_NS  # all that the first scan finds is older than what is stored meanwhile
        self._faults = LogLimiter(LOG_SECONDS, environment.clock)

    @staticmethod
    def _capacity(config: RespConfig, max_value_bytes: int) -> Capacity:
        return Capacity(
            config.limit_bytes,
            object_overhead_bytes=OBJECT_OVERHEAD_BYTES,
            largest_object_bytes=max_value_bytes * MAX_PARTS,
        )

    def status(self) -> dict[str, int]:
        return {
            "servers": len(self._servers.addresses),
            "connections_made": sum(client.connections for client in self._clients),
            "server_changes": sum(client.changes for client in self._clients),
        }

    async def open(self, inventory: Inventory) -> None:
        config = self._config
        self._servers = await in_thread("l2-open", find_servers, config, self._clock)
        told_bytes = self._servers.max_value_bytes or MAX_VALUE_BYTES
        max_value_bytes = max(MIN_VALUE_BYTES, min(config.max_value_bytes, told_bytes))
        self.capacity = self._capacity(config, max_value_bytes)
        own = {"max_value_bytes": max_value_bytes}
        options = client_options(config)
        self._bulk = NativeResp(make_client(config, options, threads=config.num_workers, **own))
        self._clients = (self._bulk,)
        self._control = NativeResp(make_client(config, options, threads=CONTROL_THREADS, no_touch=True, **own))
        self._clients = (self._bulk, self._control)
        self._assign()
        self._inventory = inventory
        self._watcher = spawn(self._watch(), f"{self._name}-watch")

    # ---- objects -----------------------------------------------------------------------------------------------------
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        """What another server has stored meanwhile is not sent again."""
        sizes = await self.probe(keys)
        outcomes = [
            StoreOutcome.ALREADY_THERE if size == buffer.nbytes else StoreOutcome.FAILED
            for size, buffer in zip(sizes, buffers, strict=True)
        ]
        new = [index for index, outcome in enumerate(outcomes) if outcome is StoreOutcome.FAILED]
        if not new:
            return outcomes
        results = await self._bulk.store([keys[index] for index in new], [buffers[index] for index in new])
        for index, error in zip(new, results.errors, strict=True):
            outcomes[index] = _STORED.get(error, StoreOutcome.FAILED)
        self._look_at("store in", self._bulk, results, expected=_STORED)
        return outcomes

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        if not keys:
            return []
        results = await self._bulk.load(keys, buffers)
        outcomes = [_LOADED.get(error, LoadOutcome.FAILED) for error in results.errors]
        self._look_at("load from", self._bulk, results, expected=_LOADED)
        if corrupt := [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is LoadOutcome.CORRUPT]:
            with contextlib.suppress(AdapterError):  # said already; what loaded has loaded
                await self.delete(corrupt, corrupt=True)
        return outcomes

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        if not keys:
            return []
        results = await self._control.sizes(keys)
        self._look_at("look up in", self._control, results, expected=_GONE)
        return [size if error == 0 else None for size, error in zip(*results, strict=True)]

    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        if not keys:
            return []
        results = await self._control.delete(pack(keys))
        self._look_at("delete from", self._control, results, expected=_GONE)
        return [error in _GONE for error in results.errors]

    async def clear(self) -> tuple[int, int]:
        await self._find_servers()
        objects = size_bytes = 0
        for _ in range(CLEAR_ATTEMPTS):
            servers = self._servers
            for node in range(len(servers.addresses)):
                cleared = await self._clear_server(node)
                objects, size_bytes = objects + cleared[0], size_bytes + cleared[1]
            if self._servers is servers:
                break  # else some pages may have been those of another server
        return objects, size_bytes

    async def _clear_server(self, node: int) -> tuple[int, int]:
        objects = size_bytes = 0
        cursor = self._scan_of(node)
        while not cursor.ended:
            page = self._page(await self._control.scan(node, cursor.next))
            if page.keys:
                results = await self._control.delete(page.keys)
                self._look_at("delete from", self._control, results, expected=_GONE)
                objects += sum(deleted == 1 for deleted in results.values)
                size_bytes += sum(
                    size for size, deleted in zip(page.sizes, results.values, strict=True) if deleted == 1
                )
            cursor.follow(page.cursor)
        cursor = self._scan_of(node)
        while not cursor.ended:  # parts whose writers died
            cursor.follow(self._page(await self._control.sweep_parts(node, cursor.next)).cursor)
        return objects, size_bytes

    async def close(self) -> None:
        for task in (self._watcher, self._search):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._watcher = self._search = None
        clients, self._clients = self._clients, ()
        for client in clients:
            await client.close()

    # ---- faults ------------------------------------------------------------------------------------------------------
    def _look_at(self, act: str, client: NativeResp, results: IoResults, expected: Container[int]) -> None:
        """Says a fault once in a while. AdapterError where it concerns the whole call."""
        faults = [error for error in results.errors if error not in expected]
        if not faults:
            return
        self._note_changes()
        error = self._fault(act, client, faults[0])
        if self._faults.due(faults[0]):
            log.warning("%s", error)
        if len(faults) == len(results.errors):
            raise error

    def _fault(self, act: str, client: NativeResp, number: int) -> AdapterError:
        said = client.last_error or os.strerror(number)
        return AdapterError(
            f"{self._name}: cannot {act} the server: {os.strerror(number)} ({said})", retryable=number != errno.EACCES
        )

    def _page(self, page: Page | int) -> Page:
        if isinstance(page, int):
            self._note_changes()
            raise self._fault("search", self._control, page)
        return page

    def _scan_of(self, node: int) -> ScanCursor:
        addresses = self._servers.addresses  # fewer by now, where the servers were found again meanwhile
        host, port = addresses[node] if node < len(addresses) else ("a server that is gone", 0)
        return ScanCursor(f"{self._name}: {host}:{port}" if port else f"{self._name}: {host}")

    # ---- servers -----------------------------------------------------------------------------------------------------
    def _assign(self) -> None:
        for client in self._clients:
            client.assign_nodes(self._servers.addresses, self._servers.slots)

    @property
    def _may_move(self) -> bool:
        """Whether a cluster or Sentinels say which servers there are."""
        return bool(self._servers.slots or self._config.sentinel)

    def _note_changes(self) -> None:
        changes = sum(client.changes for client in self._clients)
        if changes == self._changes_seen or not self._may_move:
            return
        self._changes_seen = changes
        if self._search is None or self._search.done():
            self._search = spawn(self._find_again(), f"{self._name}-servers")

    async def _find_again(self) -> None:
        await asyncio.sleep(SEARCH_PAUSE_SECONDS)
        await self._find_servers()

    async def _find_servers(self) -> None:
        """Before everything is searched, too: one that joined is told by no fault, because redirects are followed."""
        if not self._may_move:
            return
        async with self._finding:
            try:
                found = await in_thread("l2-servers", self._find_any)
            except (ConfigError, ResourceError) as error:
                if self._faults.due("servers"):
                    log.warning("%s: its servers cannot be found: %s", self._name, error)
                return
            if (found.addresses, found.slots) != (self._servers.addresses, self._servers.slots):
                log.info("%s: its servers are now %s", self._name, ", ".join(f"{h}:{p}" for h, p in found.addresses))
                self._servers = found
                self._assign()

    def _find_any(self) -> Servers:
        """Asks the configured server, else the others of the cluster."""
        try:
            return find_servers(self._config, self._clock)
        except (ConfigError, ResourceError):
            for host, port in self._servers.addresses if self._servers.slots else ():
                try:
                    return find_servers(self._config, self._clock, (host, port))
                except (ConfigError, ResourceError):
                    continue
            raise

    # ---- what the servers hold ---------------------------------------------------------------------------------------
    async def _watch(self) -> None:
        scan_seconds = await self._try(self._scan)
        self._inventory.complete()
        loop = asyncio.get_running_loop()
        next_sweep = loop.time()
        while True:
            if loop.time() >= next_sweep:
                scan_seconds += await self._try(self._sweep_orphans)
                next_sweep = loop.time() + ORPHANS_SECONDS
            await asyncio.sleep(min(max(WATCH_SECONDS, SCAN_SHARE * scan_seconds), WATCH_MAX_SECONDS))
            scan_seconds = await self._try(self._scan)

    async def _try(self, search: Callable[[], Awaitable[None]]) -> float:
        """Seconds that it took."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            await search()
        except AdapterError as error:
            if self._faults.due("scan"):
                log.warning("%s; what it holds is found when it is asked for", error)
        except Exception as error:  # the root of a task: the adapter serves without an inventory
            log.log(level_of(error), "%s: the servers could not be searched", self._name, exc_info=True)
        return loop.time() - started

    async def _sweep_orphans(self) -> None:
        """Parts whose manifest was evicted, or whose server was away when their object was deleted: nothing counts
        them, and they do not expire."""
        swept = 0
        for node in range(len(self._servers.addresses)):
            cursor = self._scan_of(node)
            while not cursor.ended:
                reply, deleted = await self._control.sweep_orphans(node, cursor.next)
                cursor.follow(self._page(reply).cursor)
                swept += deleted
        if swept:
            log.info("%s: deleted %d parts that belonged to no object", self._name, swept)

    async def _scan(self) -> None:
        """Tells what the servers hold, and which of the known objects they do not."""
        await self._find_servers()
        scan, started_ns = self._inventory.begin_scan(), wall_ns(self._clock)
        objects = Objects(self._clock)
        for node in range(len(self._servers.addresses)):
            cursor = self._scan_of(node)
            while not cursor.ended:
                page = self._page(await self._control.scan(node, cursor.next))
                if not objects.add(page):
                    raise AdapterError(f"{self._name}: its servers name more than {MAX_L2_LISTED_OBJECTS} objects")
                cursor.follow(page.cursor)
        namespaces = await namespaces_of(objects, self._control, self._config.prefix)
        order = await in_thread("l2-order", objects.youngest_first, namespaces)
        for columns, newer in objects.slices(namespaces, order, self._searched_until_ns, INVENTORY_SLICE):
            self._inventory.found(columns, newer=newer)
            await asyncio.sleep(0)
        self._searched_until_ns = started_ns - IDLE_TIME_NS
        for keys in self._inventory.known(unseen_by=scan):
            if keys:
                sizes = await self.probe(keys)  # one may have been stored during the scan
                self._inventory.lost([key for key, size in zip(keys, sizes, strict=True) if size is None])
            await asyncio.sleep(0)


_STORED = {
    0: StoreOutcome.STORED,
    errno.ENOSPC: StoreOutcome.FULL,
    errno.EFBIG: StoreOutcome.TOO_LARGE,
}
_LOADED = {
    0: LoadOutcome.LOADED,
    errno.ENOENT: LoadOutcome.MISSING,
    errno.EBADMSG: LoadOutcome.CORRUPT,
}
_GONE = (0, errno.ENOENT)
