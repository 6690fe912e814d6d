"""Mooncake's client: its start, its end, and calls of it on threads.

What is not said of it, and what follows from it here:
- `setup` and `close` hold the GIL while they wait for the services. So these are asked first whether they are there,
  and the last client of the process is ended by a function that the library has beside its Python module.
- A call of a client that is not set up, or closed, ends the process. So no call is begun outside of a life, and a life
  does not end before its calls.
- What it brings loads the machine's libzstd, whose internal calls then reach Mooncake's own version and crash the
  process. So the machine's, which the serde `zstd` uses, is loaded first.
- A transfer that its call gave up after a minute goes on, and writes into memory that has been given back. Only the end
  of the client ends it. So a call that failed that late returns when the client has been replaced.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from lmcache import _native
from lmcache.errors import AdapterError, ResourceError
from lmcache.l2.adapters.mooncake_config import MooncakeConfig
from lmcache.l2.background import in_thread, spawn, until_done
from lmcache.l2.call_threads import CallThreads

T = TypeVar("T")

INSTALL = "`pip install 'lmcache[mooncake]'`"
SYSTEM_LIBRARIES = "libibverbs1 libcurl4 libnuma1"  # which its wheel does not carry
CONTROL_THREADS = 2  # lookups never wait behind a frame
CONNECT_SECONDS = 5.0
SETUP_SECONDS = 15.0
# What Mooncake reads of the environment, where it is not there. By itself it tries 20 times to get ready, some seconds
# each, and waits 30 seconds for each answer of the master, in both of which no other thread may run.
DEFAULTS = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "2",
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "5000",
}
# `ResourceTracker::getInstance()` and `cleanupAllResources()`, which Mooncake itself calls when the process exits.
TRACKER, CLEAN_UP = (
    "_ZN8mooncake15ResourceTracker11getInstanceEv",
    "_ZN8mooncake15ResourceTracker19cleanupAllResourcesEv",
)
LATE_SECONDS = 50.0  # Mooncake gives a transfer up after 60
RDMA_DEVICES = "/sys/class/infiniband"

NO_SPACE = -200
TOO_SMALL = -600
NOT_READY = -703
MISSING = -704
EXISTS = -705
TRANSFER_FAILED = -800


class Range(NamedTuple):
    """A range of memory."""

    address: int
    size_bytes: int

    def holds(self, address: int, size_bytes: int) -> bool:
        return self.address <= address and address + size_bytes <= self.address + self.size_bytes


class Store(Protocol):
    """What is used of `mooncake.store.MooncakeDistributedStore`. Codes below 0 are faults."""

    def setup(self, _keys: dict[str, str], /) -> int: ...
    def register_buffer(self, _address: int, _size: int, /) -> int: ...
    def unregister_buffer(self, _address: int, /) -> int: ...
    def batch_put_from(self, _names: list[str], _addresses: list[int], _sizes: list[int], /) -> list[int]: ...
    def batch_get_into(self, _names: list[str], _addresses: list[int], _sizes: list[int], /) -> list[int]: ...
    def batch_is_exist(self, _names: list[str], /) -> list[int]: ...
    def batch_get_replica_desc(self, _names: list[str], /) -> dict[str, list[Any]]: ...
    def get_size(self, _name: str, /) -> int: ...
    def batch_remove(self, _names: list[str], _by_force: bool, /) -> list[int]: ...
    def remove_by_regex(self, _pattern: str, _by_force: bool, /) -> int: ...
    def close(self) -> int: ...


def load_package(where: str) -> Callable[[], Store]:
    """What makes a client. ResourceError where the package is missing or cannot be loaded."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    _native.zstd_refusal()
    try:
        module = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ResourceError(
            f'{where}: the package "mooncake-transfer-engine-non-cuda" cannot be loaded ({error}); '
            f"install it with {INSTALL} and, on Debian, `apt-get install {SYSTEM_LIBRARIES}`."
        ) from None
    return cast("Callable[[], Store]", module.MooncakeDistributedStore)


def refuse_missing_devices(config: MooncakeConfig) -> None:
    """ResourceError: Mooncake itself would go on by TCP."""
    if config.protocol == "rdma" and not (os.path.isdir(RDMA_DEVICES) and os.listdir(RDMA_DEVICES)):
        raise ResourceError(
            f'{config.where}: "protocol" "rdma" needs an RDMA device, and {RDMA_DEVICES} has none; '
            'install its driver, or use "tcp".'
        )


class ClientEnds:
    """How the clients of this process end. Mooncake can end all of them at once without the GIL, but only once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set_up: set[int] = set()  # by id()
        self.may_end_all = True  # False where the process has clients that nobody tells here

    def begun(self, store: Store) -> None:
        with self._lock:
            self._set_up.add(id(store))

    def end(self, store: Store, *, is_last: bool) -> None:
        """Blocks, in most cases for seconds. `is_last`: of this process; where it is not, all other threads wait."""
        with self._lock:
            self._set_up.discard(id(store))
            if is_last and self.may_end_all and not self._set_up:
                _end_all()
        store.close()


def _end_all() -> None:
    """What `close` would do, for every client. Nothing where the library of another version has no such function."""
    module = sys.modules.get("mooncake.store")
    if module is None or module.__file__ is None:
        return
    library = ctypes.CDLL(module.__file__)  # which is loaded; its functions are called without the GIL
    try:
        tracker, clean_up = library[TRACKER], library[CLEAN_UP]
    except AttributeError:
        return
    tracker.argtypes, tracker.restype = [], ctypes.c_void_p
    clean_up.argtypes, clean_up.restype = [ctypes.c_void_p], None
    clean_up(tracker())


CLIENT_ENDS = ClientEnds()


class MooncakeClient:
    """`region`: L1, registered once. Construct on the loop that uses it. `late_seconds`: from when on a transfer that
    failed may still run."""

    def __init__(
        self,
        config: MooncakeConfig,
        region: Range | None,
        make_store: Callable[[], Store],
        late_seconds: float = LATE_SECONDS,
    ) -> None:
        self._config = config
        self._region = region
        self._make_store = make_store
        self._late_seconds = late_seconds
        self._store: Store | None = None
        self._transfers = CallThreads(f"{config.name}-transfer", config.num_workers)
        self._control = CallThreads(f"{config.name}-control", CONTROL_THREADS)
        self._is_closed = False
        self._running = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._changing = asyncio.Lock()
        self.replaced = 0

    async def open(self) -> None:
        """ResourceError where the store cannot be used."""
        await in_thread("l2-open", self._refuse_unreachable)
        await self._connect()

    async def control(self, call: Callable[[Store], T]) -> T:
        """A call that moves no object. AdapterError where there is no client."""
        _, result = await self._run(self._control, call)
        return result

    async def transfer(
        self, call: Callable[[Store], list[int]], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """A call that moves objects from or to memory. When it returns, also when it is cancelled, nothing uses that
        memory any more."""
        return await until_done(asyncio.ensure_future(self._transfer(call, addresses, sizes)))

    async def _transfer(
        self, call: Callable[[Store], list[int]], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        loop_time = asyncio.get_running_loop().time
        outside: list[tuple[int, int]] = []
        if self._config.protocol == "rdma":
            places = zip(addresses, sizes, strict=True)
            outside = [place for place in places if self._region is None or not self._region.holds(*place)]

        def timed(store: Store) -> tuple[list[int], float]:
            """With the seconds that it took, without those that it waited for a thread."""
            started = loop_time()
            return _registered(outside, call, store), loop_time() - started

        store, (codes, seconds) = await self._run(self._transfers, timed)
        if seconds >= self._late_seconds and any(code == TRANSFER_FAILED for code in codes):
            await self._replace(store)
        return codes

    async def close(self) -> None:
        """Waits for everything that was begun. Idempotent."""
        self._is_closed = True
        await self._transfers.close()
        await self._control.close()
        await self._disconnect(is_last=True)

    # ---- lives -------------------------------------------------------------------------------------------------------
    async def _run(self, threads: CallThreads, call: Callable[[Store], T]) -> tuple[Store, T]:
        """With the client that it was a call of."""
        async with self._changing:
            if self._store is None:
                await self._reconnect()
            store = self._store
            assert store is not None
            self._running += 1
            self._is_idle.clear()
        try:
            return store, await threads.run(lambda: call(store))
        finally:
            self._running -= 1
            if not self._running:
                self._is_idle.set()

    async def _replace(self, store: Store) -> None:
        """When it returns, this client has ended; another one may be there already."""
        async with self._changing:
            if self._store is store:
                await self._is_idle.wait()
                await self._disconnect(is_last=False)
                self.replaced += 1

    async def _reconnect(self) -> None:
        if self._is_closed:
            raise AdapterError("the adapter is closed")
        try:
            await self.open()
        except ResourceError as error:
            raise AdapterError(str(error), retryable=True) from None

    async def _connect(self) -> None:
        is_late = threading.Event()
        task = asyncio.ensure_future(in_thread("l2-open", self._set_up, is_late))
        try:
            await asyncio.wait({task}, timeout=SETUP_SECONDS)
        finally:
            if not task.done():
                is_late.set()
                task.add_done_callback(self._end_late)
        if not task.done():
            raise ResourceError(f"{self._config.where}: Mooncake's client was not ready within {SETUP_SECONDS:g} s.")
        self._store = task.result()

    def _end_late(self, task: asyncio.Task[Store]) -> None:
        """Ends a client for which nobody waits any more."""
        if not task.cancelled() and task.exception() is None:
            spawn(in_thread("l2-close", _end, task.result(), self._region, False), f"{self._config.name}-close")

    def _set_up(self, is_late: threading.Event) -> Store:
        where, store = self._config.where, self._make_store()
        if _setup(store, self._config):
            raise ResourceError(
                f"{where}: Mooncake's client refuses these keys or found no store; its lines above say why."
            )
        CLIENT_ENDS.begun(store)
        if not is_late.is_set() and (self._region is None or not store.register_buffer(*self._region)):
            return store
        CLIENT_ENDS.end(store, is_last=False)
        raise ResourceError(f"{where}: Mooncake's client cannot use L1 as memory; its lines above say why.")

    async def _disconnect(self, *, is_last: bool) -> None:
        store, self._store = self._store, None
        if store is not None:
            await in_thread("l2-close", _end, store, self._region, is_last)

    def _refuse_unreachable(self) -> None:
        for key, address in self._config.services.items():
            try:
                socket.create_connection(address, CONNECT_SECONDS).close()
            except OSError as error:
                raise ResourceError(
                    f"{self._config.where}: nothing answers at {key} {address[0]}:{address[1]} ({error}); start it, or "
                    f"correct {key}."
                ) from None


def _registered(places: Sequence[tuple[int, int]], call: Callable[[Store], list[int]], store: Store) -> list[int]:
    """The call, with memory registered for it alone."""
    registered: list[int] = []
    try:
        for address, size_bytes in places:
            if store.register_buffer(address, size_bytes):
                raise AdapterError("Mooncake does not register the memory of a transfer")
            registered.append(address)
        return call(store)
    finally:
        for address in registered:
            store.unregister_buffer(address)


def _setup(store: Store, config: MooncakeConfig) -> int:
    """ResourceError where the keys need a younger Mooncake."""
    try:
        return store.setup(config.setup_keys)
    except TypeError:  # of a version that takes no keys
        try:
            positional = config.positional_setup()
        except ValueError as error:
            raise ResourceError(
                f"{config.where}: the Mooncake that is installed is too old for these keys: {error}; "
                f"install a younger one with {INSTALL}, or correct it."
            ) from None
        return cast("Callable[..., int]", store.setup)(*positional)


def _end(store: Store, region: Range | None, is_last: bool) -> None:
    if region is not None:
        store.unregister_buffer(region.address)
    CLIENT_ENDS.end(store, is_last=is_last)
