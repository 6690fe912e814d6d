"""What only a GPU can do to the worker side: run behind, fail in the middle, and go away."""

from __future__ import annotations

import logging
import os
from array import array
from collections import Counter
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from lmcache.integration.engine.connector_metadata import GroupLoad  # noqa: E402
from lmcache.memory.server_memory import ServerMemory  # noqa: E402
from polling import until  # noqa: E402
from unit.device.fake_cuda import ILLEGAL_ADDRESS, FakeCuda  # noqa: E402
from unit.integration.engine.workers import EPOCH, MEMORY_BYTES, Worker, hashes, packed  # noqa: E402
from unit.integration.vllm.fakes import hello  # noqa: E402

LOADS, STORES = -5, 0  # priorities of the fake's streams


@pytest.fixture
def memory() -> Iterator[ServerMemory]:
    shared = ServerMemory.create(f"lmcache-test-gpu-{os.getpid()}", MEMORY_BYTES, EPOCH)
    shared.grow(MEMORY_BYTES)
    yield shared
    shared.close()


@pytest.fixture(params=["gpu shm", "gpu socket"])
def worker(memory: ServerMemory, fake_cuda: FakeCuda, request: pytest.FixtureRequest) -> Iterator[Worker]:
    made = Worker(memory, request.param)
    yield made
    fake_cuda.release()
    made.side.close()


def committed(worker: Worker, count: int = 1) -> list[bytes]:
    until(lambda: len(worker.client.messages("commit")) == count)
    return [commit.written for commit in worker.client.messages("commit")]


def stored(worker: Worker, *names: int) -> array[int]:
    """Chunk i is in blocks 2i + 1 and 2i + 2. Returns the slots of a load."""
    before = len(worker.client.messages("commit"))
    worker.store(1, [list(range(1, 2 * len(names) + 1))], hashes(*names))
    worker.ended_stores()
    assert committed(worker, before + 1)[-1] == b"\1" * len(names)
    return array("Q", [*worker.slots_given[: len(names)]] * 2)


def test_a_store_takes_what_the_forward_pass_before_it_has_made(worker: Worker, fake_cuda: FakeCuda) -> None:
    fake_cuda.hold()
    worker.store(1, [[1, 2]], hashes(10))
    assert worker.side.report() is None and worker.client.messages("reserve") == []
    worker.fill(1)  # the forward pass ends only now
    original = worker.layers[0][1].clone()
    fake_cuda.release()
    assert worker.ended_stores() == Counter({1: 1})
    assert committed(worker) == [b"\1"]
    worker.fill(2)
    worker.load("r", [GroupLoad(0, packed(3, 4))], hashes(10), array("Q", [worker.slots_given[0]] * 2))
    assert not worker.ended_loads().failed_blocks
    assert torch.equal(worker.layers[0][3], original)
    assert fake_cuda.copies(to_device=False, priority=LOADS) == 0


def test_a_load_leaves_blocks_to_the_forward_pass_before_it(worker: Worker, fake_cuda: FakeCuda) -> None:
    worker.fill(1)
    slots = stored(worker, 10)
    original = worker.layers[0][1].clone()
    copies = fake_cuda.copies(to_device=True, priority=LOADS)
    fake_cuda.hold()
    worker.load("r", [GroupLoad(0, packed(3, 4))], hashes(10), slots)
    worker.fill(2)  # work of the engine that still uses them
    before = worker.layers[0][3].clone()
    assert worker.side.ended_loads().requests == set()
    assert fake_cuda.copies(to_device=True, priority=LOADS) == copies
    assert torch.equal(worker.layers[0][3], before)
    fake_cuda.release()
    assert worker.ended_loads().requests == {"r"}
    assert torch.equal(worker.layers[0][3], original)
    assert fake_cuda.copies(to_device=True, priority=LOADS) > copies


def test_a_chunk_that_was_not_copied_is_not_committed(
    worker: Worker, fake_cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    worker.fill(1)
    for call in ("cuMemcpyBatchAsync", "cuMemcpyDtoHAsync_v2", "cuLaunchKernel"):
        fake_cuda.fail(call)  # whichever way was found to be the fastest
    worker.store(1, [[1, 2, 3, 4, 5, 6]], hashes(10, 11, 12))
    assert worker.ended_stores() == Counter({1: 1})
    (written,) = committed(worker)
    assert sorted(written) == [0, 1, 1]
    worker.side.ended_loads()
    worker.side.ended_loads()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "The GPU failed to copy KV" in caplog.text and "CUDA_ERROR_OUT_OF_MEMORY" in caplog.text


def test_a_load_that_was_not_copied_is_computed_again_and_not_called_corrupt(
    worker: Worker,
    fake_cuda: FakeCuda,
) -> None:
    worker.fill(1)
    slots = stored(worker, 10, 11, 12)
    for call in ("cuMemcpyBatchAsync", "cuMemcpyHtoDAsync_v2", "cuLaunchKernel"):
        fake_cuda.fail(call)
    worker.load("r", [GroupLoad(0, packed(11, 12, 13, 14, 15, 16))], hashes(10, 11, 12), slots)
    ended = worker.ended_loads()
    assert ended.requests == {"r"} and len(ended.failed_blocks) == 2
    assert worker.side.report() is None
    worker.load("s", [GroupLoad(0, packed(11, 12, 13, 14, 15, 16))], hashes(10, 11, 12), slots)
    assert not worker.ended_loads().failed_blocks


@pytest.mark.parametrize("when", ["before", "while it copies"])
def test_without_its_gpu_every_order_still_ends(worker: Worker, fake_cuda: FakeCuda, when: str) -> None:
    worker.fill(1)
    slots = stored(worker, 10, 11)
    if when == "before":
        fake_cuda.lose_context()
    else:
        fake_cuda.delay(200)
        fake_cuda.fail("execution", skip=1, code=ILLEGAL_ADDRESS)
    worker.store(2, [[1, 2, 3, 4]], hashes(20, 21))
    worker.load("r", [GroupLoad(0, packed(11, 12, 13, 14))], hashes(10, 11), slots)
    ended = worker.ended_loads()
    assert ended.requests == {"r"} and (when != "before" or ended.failed_blocks == {11, 12, 13, 14})
    assert worker.ended_stores() == Counter({2: 1})
    worker.store(3, [[1, 2]], hashes(22))
    assert worker.ended_stores() == Counter({3: 1})
    worker.load("s", [GroupLoad(0, packed(11, 12))], hashes(10), array("Q", [slots[0]] * 2))
    assert worker.ended_loads().failed_blocks == {11, 12}
    worker.side.close()


def test_memory_that_cannot_be_pinned_is_copied_all_the_same(memory: ServerMemory, fake_cuda: FakeCuda) -> None:
    fake_cuda.fail("cuMemHostRegister_v2", times=1000)
    unpinned = Worker(memory, "gpu shm")
    unpinned.fill(1)
    slots = stored(unpinned, 10)
    original = unpinned.layers[0][1].clone()
    unpinned.fill(2)
    unpinned.load("r", [GroupLoad(0, packed(3, 4))], hashes(10), slots)
    assert not unpinned.ended_loads().failed_blocks
    assert torch.equal(unpinned.layers[0][3], original)
    unpinned.side.close()


def test_a_gpu_that_refuses_streams_leaves_the_engine_uncached(
    memory: ServerMemory, fake_cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    fake_cuda.fail("cuStreamCreateWithPriority", skip=1)  # the first is the trial's
    refused = Worker(memory, "gpu shm")
    assert "This engine runs uncached: cuStreamCreateWithPriority failed" in caplog.text
    assert refused.client.declared == []
    refused.load("r", [GroupLoad(0, packed(3, 4))], hashes(10), array("Q", [4096] * 2))
    assert refused.ended_loads().failed_blocks == {3, 4}
    refused.side.close()


def test_the_memory_of_a_previous_server_is_given_back(memory: ServerMemory, fake_cuda: FakeCuda) -> None:
    worker = Worker(memory, "gpu shm")
    until(lambda: fake_cuda.calls("cuMemHostRegister_v2") == 1)
    worker.client.hello = hello(b"epoch-two-epoch-")
    worker.client.meet(worker.client)
    assert fake_cuda.calls("cuMemHostUnregister") == 1
    until(lambda: fake_cuda.calls("cuMemHostRegister_v2") == 2)
    worker.side.close()
    assert fake_cuda.calls("cuMemHostUnregister") == 2
