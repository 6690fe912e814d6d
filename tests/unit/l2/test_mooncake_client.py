"""The lives of Mooncake's client, with a stand-in for it: what the real one shows only after a minute, or seldom."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest

from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError, ResourceError
from lmcache.l2.adapter_types import parse_adapter
from lmcache.l2.adapters import mooncake, mooncake_client
from lmcache.l2.adapters.mooncake import MooncakeAdapter
from lmcache.l2.adapters.mooncake_config import MooncakeConfig
from lmcache.testing.contract_run import RecordingInventory
from lmcache.testing.frames import FrameMemory, keys, namespace
from lmcache.testing.processes import LOOPBACK

SECONDS = 20.0


class Mooncake:
    """A store whose transfers fail and go on in memory until the client is closed, as the real ones do after a minute.
    Each call of a gated kind waits for its gate."""

    def __init__(self) -> None:
        self.clients: list[Client] = []
        self.objects: dict[str, int] = {}  # sizes in bytes
        self.load_gates: list[threading.Event] = []
        self.register_gate: threading.Event | None = None
        self.load_seconds = 0.0
        self.has_offloaded = False  # every object, to disks
        self.is_master_gone = False
        self.sizes_asked = 0
        self.patterns = 0

    def make(self) -> Any:
        self.clients.append(Client(self))
        return self.clients[-1]

    @property
    def open_clients(self) -> int:
        return sum(client.is_open for client in self.clients)


class ReplicaOnADisk:
    """Of another machine: there is no way to its size."""

    def is_memory_replica(self) -> bool:
        return False

    def is_disk_replica(self) -> bool:
        return False


class Client:
    def __init__(self, service: Mooncake) -> None:
        self._service = service
        self.is_open = False

    def setup(self, _: dict[str, str]) -> int:
        self.is_open = True
        return 0

    def register_buffer(self, *_: int) -> int:
        gate = self._service.register_gate
        assert gate is None or gate.wait(SECONDS)
        return 0

    def unregister_buffer(self, _: int) -> int:
        return 0

    def batch_is_exist(self, names: list[str]) -> list[int]:
        assert self.is_open
        return [int(self._service.has_offloaded and name in self._service.objects) for name in names]

    def batch_get_replica_desc(self, names: list[str]) -> dict[str, list[Any]]:
        return {name: [ReplicaOnADisk()] for name in names}

    def get_size(self, name: str) -> int:
        self._service.sizes_asked += 1
        if self._service.is_master_gone:
            return -900
        return self._service.objects.get(name, mooncake_client.MISSING)

    def batch_get_into(self, names: list[str], *_: object) -> list[int]:
        gates = self._service.load_gates
        assert not gates or gates.pop(0).wait(SECONDS)
        time.sleep(self._service.load_seconds)  # as long as the real one lasts
        assert self.is_open
        return [mooncake_client.TRANSFER_FAILED] * len(names)

    def batch_put_from(self, names: list[str], _: object, sizes: list[int]) -> list[int]:
        self._service.objects |= dict(zip(names, sizes, strict=True))
        return [0] * len(names)

    def remove_by_regex(self, pattern: str, _: bool) -> int:
        self._service.patterns += 1
        found = [name for name in self._service.objects if re.search(pattern, name)]
        for name in found:
            del self._service.objects[name]
        return len(found)

    def close(self) -> int:
        assert self.is_open
        self.is_open = False
        return 0


@pytest.fixture
def config() -> Iterator[MooncakeConfig]:
    with socket.create_server((LOOPBACK, 0)) as listener:
        address = f"{LOOPBACK}:{listener.getsockname()[1]}"
        spec = {"type": "mooncake_store", "local_hostname": LOOPBACK, "metadata_server": "P2PHANDSHAKE"}
        config = parse_adapter({**spec, "master_server_addr": address, "num_workers": 4}, 0)
        assert isinstance(config, MooncakeConfig)
        yield config


def live(adapter: MooncakeAdapter, test: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await adapter.open(RecordingInventory())
        try:
            await test()
        finally:
            await adapter.close()

    asyncio.run(asyncio.wait_for(whole(), SECONDS))


async def load(adapter: MooncakeAdapter, wanted: list[ObjectKey]) -> list[LoadOutcome]:
    try:
        return await adapter.load(wanted, FrameMemory(len(wanted)).buffers)
    except AdapterError:
        return [LoadOutcome.FAILED] * len(wanted)


@pytest.mark.parametrize("late_seconds", [0.0, 50.0])
def test_a_transfer_that_may_still_run_is_ended_before_its_memory_is_given_back(
    config: MooncakeConfig, late_seconds: float
) -> None:
    service = Mooncake()
    adapter = MooncakeAdapter(config, service.make, late_seconds)

    async def test() -> None:
        assert await load(adapter, keys(2)) == [LoadOutcome.FAILED] * 2
        assert service.open_clients == (0 if late_seconds == 0 else 1)
        assert await adapter.probe(keys(2)) == [None] * 2
        assert service.open_clients == 1
        assert adapter.status() == {"clients_replaced": 1 if late_seconds == 0 else 0}

    live(adapter, test)
    assert service.open_clients == 0


def test_late_transfers_of_one_client_replace_it_once(config: MooncakeConfig) -> None:
    """The second one ends while somebody waits for the next client, which has done nothing wrong."""
    service = Mooncake()
    first, second = threading.Event(), threading.Event()
    service.load_gates = [first, second]
    adapter = MooncakeAdapter(config, service.make, 0.0)

    async def test() -> None:
        loads = [asyncio.ensure_future(load(adapter, keys(1))) for _ in range(2)]
        while service.load_gates:
            await asyncio.sleep(0.001)
        first.set()
        done, _ = await asyncio.wait(loads, timeout=0.1)
        assert not done  # the memory of both is in use until the client has ended
        probing = asyncio.ensure_future(adapter.probe(keys(1)))
        await asyncio.sleep(0)
        second.set()
        assert await probing == [None]
        assert await asyncio.gather(*loads) == [[LoadOutcome.FAILED]] * 2
        assert len(service.clients) == 2 and service.open_clients == 1
        assert adapter.status() == {"clients_replaced": 1}

    live(adapter, test)


def test_waiting_for_a_thread_makes_no_transfer_late(config: MooncakeConfig) -> None:
    service = Mooncake()
    service.load_seconds = 0.05
    count = 8 * config.num_workers
    adapter = MooncakeAdapter(config, service.make, 0.25)

    async def test() -> None:
        loads = [load(adapter, keys(1)) for _ in range(count)]
        assert await asyncio.gather(*loads) == [[LoadOutcome.FAILED]] * count
        assert adapter.status() == {"clients_replaced": 0}

    live(adapter, test)


def test_a_closed_adapter_makes_no_other_client(config: MooncakeConfig) -> None:
    service = Mooncake()
    adapter = MooncakeAdapter(config, service.make)

    async def test() -> None:
        await adapter.close()
        with pytest.raises(AdapterError, match="closed"):
            await adapter.probe(keys(1))

    live(adapter, test)
    assert len(service.clients) == 1 and service.open_clients == 0


def test_a_client_that_comes_too_late_is_closed(config: MooncakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_client, "SETUP_SECONDS", 0.05)
    service, memory = Mooncake(), FrameMemory(1)
    service.register_gate = threading.Event()
    adapter = MooncakeAdapter(config, service.make)
    adapter.lend_memory(memory.address(0), memory.slot_bytes)

    async def test() -> None:
        with pytest.raises(ResourceError, match="was not ready within"):
            await adapter.open(RecordingInventory())
        assert service.open_clients == 1 and service.register_gate is not None
        service.register_gate.set()
        while service.open_clients:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(test(), SECONDS))


def test_clearing_many_namespaces_asks_few_questions(config: MooncakeConfig) -> None:
    """Each is a look at every object of the store."""
    service = Mooncake()
    adapter = MooncakeAdapter(config, service.make)
    tenants = [keys(2, of=namespace(salt=f"tenant {at}")) for at in range(10 * mooncake.COUNTED_NAMESPACES)]
    memory = FrameMemory(2)

    async def test() -> None:
        for wanted in tenants:
            frames = [memory.fill(slot, key) for slot, key in enumerate(wanted)]
            assert await adapter.store(wanted, frames) == [StoreOutcome.STORED] * 2
        count = 2 * len(tenants)
        assert await adapter.clear() == (count, count * memory.slot_bytes)
        assert service.patterns == mooncake.COUNTED_NAMESPACES + 1 and not service.objects
        assert await adapter.clear() == (0, 0)

    live(adapter, test)


def test_what_is_on_a_disk_only_is_found(config: MooncakeConfig) -> None:
    service = Mooncake()
    adapter = MooncakeAdapter(config, service.make)
    wanted, memory = keys(3), FrameMemory(3)

    async def test() -> None:
        frames = [memory.fill(slot, key) for slot, key in enumerate(wanted)]
        assert await adapter.store(wanted[:2], frames[:2]) == [StoreOutcome.STORED] * 2
        service.has_offloaded = True
        assert await adapter.probe(wanted) == [memory.slot_bytes] * 2 + [None]
        assert await adapter.store(wanted[:2], frames[:2]) == [StoreOutcome.ALREADY_THERE] * 2
        service.is_master_gone, service.sizes_asked = True, 0
        with pytest.raises(AdapterError, match="the master does not answer"):
            await adapter.probe(wanted)
        assert service.sizes_asked == 1  # each lasts seconds

    live(adapter, test)


class OldClient(Client):
    """Whose setup has no keys."""

    def __init__(self, service: Mooncake) -> None:
        super().__init__(service)
        self.given: tuple[object, ...] = ()

    def setup(self, first: object, *others: object) -> int:
        if not others:
            raise TypeError("incompatible function arguments")
        self.given = (first, *others)
        return super().setup({})


def test_a_client_whose_setup_has_no_keys_is_given_them_by_position(config: MooncakeConfig) -> None:
    old: Any = OldClient(Mooncake())
    sized = msgspec.structs.replace(config, global_segment_size="3221225472", local_buffer_size=1 << 20)

    async def test() -> None:
        address = config.master_server_addr
        assert old.given == (LOOPBACK, "P2PHANDSHAKE", 3221225472, 1 << 20, "tcp", "", address)

    live(MooncakeAdapter(sized, lambda: old), test)


@pytest.mark.parametrize("keys", [{"tenant_id": "one"}, {"global_segment_size": "3 GB"}])
def test_what_such_a_client_cannot_be_told_is_one_sentence(config: MooncakeConfig, keys: dict[str, Any]) -> None:
    own = {name: getattr(config, name) for name in ("local_hostname", "metadata_server", "master_server_addr")}
    spec = parse_adapter({"type": "mooncake_store", **own, **keys}, 0)
    assert isinstance(spec, MooncakeConfig)
    old: Any = OldClient(Mooncake())
    adapter = MooncakeAdapter(spec, lambda: old)

    async def opened() -> None:
        await adapter.open(RecordingInventory())

    (key,) = keys
    with pytest.raises(ResourceError, match=f'too old for these keys: it takes .*"{key}"'):
        asyncio.run(opened())
