"""A worker over real shared memory and real copies, against a server that does what the test says."""

from __future__ import annotations

import functools
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lmcache.client.engine_environment import ENGINE_SYSTEM, EngineEnvironment
from lmcache.device.cpu import PagedGroup, describe_group
from lmcache.device.cuda import Gpu, describe_gpu_group
from lmcache.integration.engine.connector_metadata import ConnectorMetadata, GroupLoad, LoadOrder, StoreOrder
from lmcache.integration.engine.frame_names import WorkerIdentity
from lmcache.integration.engine.store_telemetry import StoreTelemetry
from lmcache.integration.engine.worker_side import EndedLoads, WorkerSide
from lmcache.memory.engine_memory import EngineMemory
from lmcache.memory.server_memory import ServerMemory
from lmcache.protocol.messages import CommitReply, Read, ReadReply, RegisterWorker, ReserveReply, Write, WriteReply
from manual_clock import ManualClock
from polling import until
from unit.device.fake_cuda import FakeCuda, the_fake_cuda
from unit.integration.vllm.fakes import FakeClient, hello

BLOCKS = 32
BLOCK_TOKENS = 128
CHUNK_TOKENS = 256
EPOCH = hello().server_epoch
SLOT_BYTES = 128 << 10
MEMORY_BYTES = 4 << 20


class WorkerClient(FakeClient):
    """With memory, and the declaration that a worker makes."""

    def __init__(self, memory: EngineMemory) -> None:
        super().__init__(ManualClock())
        self.memory = memory
        self.hello = hello(chunk_tokens=CHUNK_TOKENS)
        self.heartbeat_interval_seconds = 10.0
        self.declared: list[RegisterWorker] = []
        self.counts: Callable[[], Sequence[int]] = tuple
        self.meet: Callable[[FakeClient], None] = lambda client: None

    def start(self) -> None:
        """Meets its server on a thread that begins here, as the real one does."""
        keeper = threading.Thread(target=lambda: self.meet(self))
        keeper.start()
        keeper.join()

    def report(self, counts: Callable[[], Sequence[int]]) -> None:
        self.counts = counts

    def declare(self, registration: RegisterWorker) -> None:
        self.declared.append(registration)


def gpu_of(fake: FakeCuda, storage: torch.Tensor, groups: Sequence[PagedGroup]) -> Gpu:
    fake.map_device(storage)
    return Gpu(groups, 0, library=fake.path, current_stream=lambda: fake.stream, trial_bytes=256 << 10)


class Worker:
    def __init__(
        self,
        memory: ServerMemory,
        mode: str = "shm",
        *,
        groups: int = 1,
        stores: bool = True,
        kv_rank: int = 0,
        environment: EngineEnvironment = ENGINE_SYSTEM,
        lossy_serde: str = "",
        telemetry: StoreTelemetry | None = None,
    ) -> None:
        """`mode`: "shm" or "socket", with "gpu " before it for KV on the fake GPU."""
        storage = torch.zeros(groups, 2, BLOCKS, 2, BLOCK_TOKENS, 16, dtype=torch.bfloat16)
        self.layers = [storage[group, layer] for group in range(groups) for layer in range(2)]
        on_gpu = mode.startswith("gpu ")
        describe = functools.partial(describe_gpu_group, device_type="cpu") if on_gpu else describe_group
        self.groups = [
            describe(
                [(f"layer{layer}", storage[group, layer]) for layer in range(2)],
                engine="e",
                block_tokens=BLOCK_TOKENS,
                num_blocks=BLOCKS,
            )
            for group in range(groups)
        ]
        self.client = WorkerClient(EngineMemory.attach(memory.path, memory.size_bytes, memory.server_epoch))
        self.lease_slots = array("Q")
        if mode.endswith("socket"):
            self.client.memory = None
            self.client.answers["write"] = lambda message: self.write(memory, message)
            self.client.answers["read"] = lambda message: self.read(memory, message)
        self.kv_rank = kv_rank
        identity = WorkerIdentity("i", 0, "model", 2, kv_rank, stores, lossy_serde)

        def make_client(meet: Callable[[FakeClient], None]) -> WorkerClient:
            self.client.meet = meet
            return self.client

        gpu = gpu_of(the_fake_cuda(), storage, self.groups) if on_gpu else None
        self.side = WorkerSide(
            make_client,  # type: ignore[arg-type]
            identity,
            self.groups,
            gpu,
            environment,
            telemetry=telemetry,
        )
        self.slots_given = array("Q", [4096 + SLOT_BYTES * i for i in range(16)])
        self.client.answers["reserve"] = self.reserve
        self.client.answers["commit"] = lambda message: CommitReply(len(message.written))

    def reserve(self, message: Any) -> ReserveReply:
        count = len(message.hashes) // 32 * len(self.groups)
        return ReserveReply(5, self.slots_given[:count].tobytes(), 0)

    def write(self, memory: ServerMemory, message: Write) -> WriteReply:
        chunks = len(self.client.messages("reserve")[-1].hashes) // 32
        slot = self.slots_given[message.group * chunks + message.chunk]
        memory.view(slot + message.offset, len(message.data))[:] = message.data
        return WriteReply(message.offset + len(message.data))

    def read(self, memory: ServerMemory, message: Read) -> ReadReply:
        chunks = len(self.lease_slots) // (2 * len(self.groups))
        row = self.kv_rank * len(self.groups) + message.group
        slot = self.lease_slots[row * chunks + message.chunk]
        return ReadReply(memoryview(bytes(memory.view(slot + message.offset, message.size_bytes))))

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers:
            layer.copy_(torch.randn(layer.shape, generator=generator))

    def store(
        self, job: int, blocks: list[list[int]], hashes: bytes, server_epoch: bytes = EPOCH, request_id: str = ""
    ) -> None:
        order = store_order(job, blocks, hashes, server_epoch, request_id)
        self.side.start_stores(ConnectorMetadata(stores=[order]))

    def load(
        self,
        request_id: str,
        loads: list[GroupLoad],
        hashes: bytes,
        slots: array[int],
        server_epoch: bytes = EPOCH,
        *,
        all_or_nothing: bool = False,
    ) -> None:
        chunks = len(hashes) // 32
        self.lease_slots = slots
        order = LoadOrder(
            request_id, server_epoch, "", chunks, hashes, slots.tobytes(), tuple(loads), 1, all_or_nothing
        )
        self.side.start_loads(ConnectorMetadata(loads=[order]), idle_step=True)

    def ended_loads(self, count: int = 1) -> EndedLoads:
        ended = EndedLoads()

        def collect() -> bool:
            now = self.side.ended_loads()
            ended.requests |= now.requests
            ended.failed_requests |= now.failed_requests
            ended.failed_blocks |= now.failed_blocks
            return len(ended.requests) >= count

        until(collect)
        return ended

    def ended_stores(self, count: int = 1) -> Counter[int]:
        ended: Counter[int] = Counter()

        def collect() -> bool:
            report = self.side.report()
            if report is not None:
                ended.update(report.ended_stores)
            return ended.total() >= count

        until(collect)
        return ended


def store_order(
    job: int, blocks: list[list[int]], hashes: bytes, server_epoch: bytes = EPOCH, request_id: str = ""
) -> StoreOrder:
    groups = tuple(array("q", group).tobytes() for group in blocks)
    return StoreOrder(job, server_epoch, "", hashes, groups, request_id=request_id)


def hashes(*names: int) -> bytes:
    return b"".join(bytes([name]) * 32 for name in names)


def packed(*blocks: int) -> bytes:
    return array("q", blocks).tobytes()
