"""The worker side over real shared memory and real copies, against a server that does what the test says."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import queue
import threading
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from typing import Any, NoReturn  # noqa: E402

from lmcache import _native  # noqa: E402
from lmcache.client.engine_environment import EngineEnvironment  # noqa: E402
from lmcache.core.frame import frame_bytes, verify_frames  # noqa: E402
from lmcache.core.key import Namespace, ObjectKey  # noqa: E402
from lmcache.device.affinity import engine_cpus, near_cpus  # noqa: E402
from lmcache.device.cuda import Gpu  # noqa: E402
from lmcache.errors import RemoteError, ServerUnavailable  # noqa: E402
from lmcache.integration.engine import socket_transfer, worker_side  # noqa: E402
from lmcache.integration.engine.connector_metadata import ConnectorMetadata, GroupLoad, LoadOrder  # noqa: E402
from lmcache.integration.engine.frame_names import WorkerIdentity  # noqa: E402
from lmcache.integration.engine.storer import Storer  # noqa: E402
from lmcache.integration.engine.transfer_backend import WorkerKV  # noqa: E402
from lmcache.integration.engine.worker_side import WorkerSide  # noqa: E402
from lmcache.memory.engine_memory import EngineMemory  # noqa: E402
from lmcache.memory.server_memory import ServerMemory  # noqa: E402
from lmcache.protocol.messages import CommitReply, Read, ReadReply, ReserveReply  # noqa: E402
from polling import until  # noqa: E402
from unit.device.fake_cuda import FakeCuda  # noqa: E402
from unit.device.topology import make_topology  # noqa: E402
from unit.integration.engine.workers import (  # noqa: E402
    CHUNK_TOKENS,
    EPOCH,
    Worker,
    WorkerClient,
    hashes,
    packed,
    store_order,
)
from unit.integration.vllm.fakes import hello  # noqa: E402

GPU_ADDRESS = "0000:17:00.0"


def test_a_worker_registers_what_it_holds(worker: Worker) -> None:
    (registration,) = worker.client.declared
    layout = worker.groups[0].layout(CHUNK_TOKENS)
    assert registration.layouts == [layout.fingerprint]
    assert registration.payload_bytes == [layout.payload_bytes]
    assert (registration.instance_id, registration.worker_id, registration.stores) == ("i", 0, True)


def test_a_worker_that_accepts_a_lossy_serde_names_it_in_its_layouts_and_frames(
    memory: ServerMemory, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    accepting = Worker(memory, mode, groups=2, lossy_serde="fp8")
    (registration,) = accepting.client.declared
    layouts = [group.layout(CHUNK_TOKENS) for group in accepting.groups]
    assert registration.layouts == [f"{layout.fingerprint}~fp8" for layout in layouts]
    accepting.fill(1)
    accepting.store(1, [[1, 2], [3, 4]], hashes(10))
    accepting.ended_stores()
    until(lambda: len(accepting.client.messages("commit")) == 1)
    for group, (layout, name) in enumerate(zip(layouts, registration.layouts, strict=True)):
        frame = memory.view(accepting.slots_given[group], frame_bytes(layout.payload_bytes))
        (fault,) = verify_frames([ObjectKey(Namespace("model", 2, 0, group, name), hashes(10))], [frame])
        assert fault == ""
    accepting.side.close()
    assert "lossy" not in caplog.text


def test_kv_that_lossy_serdes_cannot_read_stays_exact(memory: ServerMemory, caplog: pytest.LogCaptureFixture) -> None:
    bfloat16 = Worker(memory).groups[0]
    wide = replace(bfloat16, layers=tuple(replace(layer, dtype="float16") for layer in bfloat16.layers))
    groups = (bfloat16, wide, replace(bfloat16, is_state=True))
    kv = WorkerKV(WorkerIdentity("i", 0, "model", 1, 0, True, "fp8"), groups, 1, None)
    layouts = kv.layouts(CHUNK_TOKENS)
    marks = [name.partition("~")[1:] for name in kv.layout_names(layouts)]
    assert marks == [("~", "fp8"), ("", ""), ("", "")]
    client = WorkerClient(EngineMemory.attach(memory.path, memory.size_bytes, memory.server_epoch))
    WorkerSide(lambda meet: client, kv.identity, groups).close()  # type: ignore[arg-type, return-value]
    assert "2 of 3 KV cache groups are not attention in bfloat16" in caplog.text


def test_a_store_is_reserved_copied_committed_and_loads_back(worker: Worker) -> None:
    worker.fill(1)
    originals = [layer.clone() for layer in worker.layers]
    worker.store(3, [[1, 2, 5, 9]], hashes(10, 11))
    assert worker.ended_stores() == Counter({3: 1})
    until(lambda: len(worker.client.messages("commit")) == 1)
    (commit,) = worker.client.messages("commit")
    assert (commit.reservation, commit.written) == (5, b"\1\1")

    worker.fill(2)
    slots = array("Q", [*worker.slots_given[:2], *worker.slots_given[:2]])  # [rank][group][chunk]
    worker.load("r", [GroupLoad(0, packed(4, -1, 6, 7))], hashes(10, 11), slots)
    ended = worker.ended_loads()
    assert ended.requests == {"r"} and not ended.failed_blocks and not ended.failed_requests
    for layer, original in zip(worker.layers, originals, strict=True):
        assert torch.equal(layer[4], original[1])
        assert torch.equal(layer[6], original[5])
        assert torch.equal(layer[7], original[9])
    assert worker.side.ended_loads().requests == set()  # once


def test_each_rank_reads_its_own_slots(memory: ServerMemory, mode: str) -> None:
    second = Worker(memory, mode, kv_rank=1)
    second.fill(1)
    original = second.layers[0][1].clone()
    second.store(1, [[1, 2]], hashes(10))
    second.ended_stores()
    second.fill(2)
    until(lambda: len(second.client.messages("commit")) == 1)
    slots = array("Q", [1 << 20, second.slots_given[0]])
    second.load("r", [GroupLoad(0, packed(3, 4))], hashes(10), slots)
    assert not second.ended_loads().failed_blocks
    assert torch.equal(second.layers[0][3], original)
    second.side.close()


def test_only_the_chunk_that_does_not_verify_fails(worker: Worker, memory: ServerMemory) -> None:
    worker.fill(1)
    worker.store(1, [[1, 2, 3, 4, 5, 6]], hashes(10, 11, 12))
    worker.ended_stores()
    until(lambda: len(worker.client.messages("commit")) == 1)
    position = worker.slots_given[1] + _native.FRAME_HEADER_BYTES + 1000
    view = memory.view(position, 1)
    view[0] ^= 1
    slots = array("Q", [*worker.slots_given[:3]] * 2)
    worker.load("r", [GroupLoad(0, packed(11, 12, 13, 14, 15, 16))], hashes(10, 11, 12), slots)
    assert worker.ended_loads().failed_blocks == {13, 14}
    report = worker.side.report()
    assert report is not None and report.unreadable == {"r": frozenset({1})}


@pytest.mark.skipif(len(engine_cpus()) < 2, reason="needs two CPUs")
def test_copies_run_on_the_node_of_the_gpu(
    memory: ServerMemory, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, *_, last = sorted(engine_cpus())
    sysfs = make_topology(tmp_path, [str(first), str(last)], {GPU_ADDRESS: 1})
    monkeypatch.setattr(Gpu, "address", GPU_ADDRESS)
    monkeypatch.setattr(worker_side, "near_cpus", functools.partial(near_cpus, sysfs=sysfs))
    before, own_cpus = threads_of_ours(), os.sched_getaffinity(0)
    worker = Worker(memory, "gpu shm")
    started = threads_of_ours() - before
    assert {name for _, name in started} >= {"lmcache-copy"}
    assert [os.sched_getaffinity(thread) for thread, _ in started] == [{last}] * len(started)
    assert os.sched_getaffinity(0) == own_cpus
    worker.side.close()


def threads_of_ours() -> set[tuple[int, str]]:
    """Of this process, with their names; a name that is not given is that of the process."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # one that ends meanwhile
            found.add((int(task.name), (task / "comm").read_text().strip()))
    return {(thread, name) for thread, name in found if name.startswith("lmcache")}


def test_bytes_of_another_key_are_never_loaded(worker: Worker) -> None:
    worker.fill(1)
    worker.store(1, [[1, 2]], hashes(10))
    worker.ended_stores()
    until(lambda: len(worker.client.messages("commit")) == 1)
    worker.load("r", [GroupLoad(0, packed(3, 4))], hashes(99), array("Q", [worker.slots_given[0]] * 2))
    assert worker.ended_loads().failed_blocks == {3, 4}


def test_failures_with_several_groups_name_the_request(memory: ServerMemory, mode: str) -> None:
    several = Worker(memory, mode, groups=2)
    slots = array("Q", [*several.slots_given[:2]] * 2)
    loads = [GroupLoad(0, packed(3, 4)), GroupLoad(0, packed(5, 6))]
    several.load("r", loads, hashes(10), slots, all_or_nothing=True)
    ended = several.ended_loads()
    assert ended.failed_requests == {"r"} == ended.requests and not ended.failed_blocks
    several.side.close()


def test_an_impossible_load_fails_though_it_has_no_block_to_write(worker: Worker) -> None:
    order = LoadOrder("r", EPOCH, "", 1, hashes(10), b"", (GroupLoad(0, packed(-1)),), 1, all_or_nothing=True)
    worker.side.start_loads(ConnectorMetadata(impossible_loads=[order]), idle_step=True)
    ended = worker.ended_loads()
    assert ended.failed_requests == {"r"} == ended.requests and not ended.failed_blocks


def test_several_groups_go_to_slots_of_their_own(memory: ServerMemory, mode: str) -> None:
    several = Worker(memory, mode, groups=2)
    several.fill(1)
    originals = [layer.clone() for layer in several.layers]
    several.store(1, [[1, 2], [7, 8]], hashes(10))
    several.ended_stores()
    until(lambda: len(several.client.messages("commit")) == 1)
    assert several.client.messages("commit")[0].written == b"\1\1"
    several.fill(2)
    slots = array("Q", [*several.slots_given[:2]] * 2)
    several.load("r", [GroupLoad(0, packed(11, 12)), GroupLoad(0, packed(-1, 14))], hashes(10), slots)
    assert not several.ended_loads().failed_requests
    assert torch.equal(several.layers[0][11], originals[0][1])
    assert torch.equal(several.layers[2][14], originals[2][8])
    several.side.close()


def test_orders_of_another_server_epoch_fail_and_end(worker: Worker) -> None:
    worker.load(
        "r", [GroupLoad(0, packed(3, 4))], hashes(10), array("Q", [4096, 4096]), server_epoch=b"other-serverepoc"
    )
    assert worker.ended_loads().failed_blocks == {3, 4}
    worker.store(8, [[1, 2]], hashes(10), server_epoch=b"other-serverepoc")
    assert worker.ended_stores() == Counter({8: 1})
    assert worker.client.messages("reserve") == []


def test_a_worker_that_does_not_store_reports_at_once(memory: ServerMemory) -> None:
    copy = Worker(memory, stores=False)
    copy.store(8, [[1, 2]], hashes(10))
    assert copy.ended_stores() == Counter({8: 1})
    assert copy.client.messages("reserve") == []
    copy.side.close()


@pytest.mark.parametrize("error", [ServerUnavailable("away"), RuntimeError("a fault")])
def test_a_store_that_cannot_be_reserved_ends(worker: Worker, error: Exception) -> None:
    def fail(message: Any) -> NoReturn:
        raise error

    worker.client.answers["reserve"] = fail
    worker.store(8, [[1, 2]], hashes(10))
    assert worker.ended_stores() == Counter({8: 1})
    worker.client.answers["reserve"] = worker.reserve
    worker.store(9, [[1, 2]], hashes(10))
    assert worker.ended_stores() == Counter({9: 1})


def test_a_store_that_meets_a_fault_ends_and_the_next_is_stored(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    worker.fill(1)
    with monkeypatch.context() as patch:
        patch.setattr(Storer, "submit", no_memory)
        worker.store(1, [[1, 2]], hashes(10))
    assert worker.ended_stores() == Counter({1: 1}) and "A store failed" in caplog.text
    worker.store(2, [[1, 2]], hashes(10))
    assert worker.ended_stores() == Counter({2: 1})


def test_slots_that_come_too_late_are_given_back(worker: Worker) -> None:
    del worker.client.answers["reserve"]
    worker.store(8, [[1, 2]], hashes(10))
    until(lambda: len(worker.client.pendings("reserve")) == 1)
    assert worker.ended_stores() == Counter({8: 1})
    worker.client.pendings("reserve")[0].outcome = ReserveReply(77, worker.slots_given[:1].tobytes(), 0)
    until(lambda: len(worker.client.messages("commit")) == 1)
    (commit,) = worker.client.messages("commit")
    assert (commit.reservation, commit.written) == (77, b"\0")


def test_slots_of_a_server_that_came_just_before_they_were_asked_for_are_given_back(worker: Worker) -> None:
    def reserve(message: Any) -> ReserveReply:
        worker.client.hello = hello(b"epoch-two-epoch-", CHUNK_TOKENS)
        return ReserveReply(77, worker.slots_given[:1].tobytes(), 0)

    worker.client.answers["reserve"] = reserve
    worker.store(8, [[1, 2]], hashes(10))
    assert worker.ended_stores() == Counter({8: 1})
    until(lambda: len(worker.client.messages("commit")) == 1)
    (commit,) = worker.client.messages("commit")
    assert (commit.reservation, commit.written) == (77, b"\0")


def test_slots_whose_number_was_lost_are_freed_by_registering_again(worker: Worker) -> None:
    worker.client.answers["reserve"] = lambda message: ServerUnavailable("the connection broke")
    worker.store(8, [[1, 2]], hashes(10))
    assert worker.ended_stores() == Counter({8: 1})
    until(lambda: len(worker.client.declared) == 2)
    first, second = worker.client.declared
    assert first == second
    assert worker.client.messages("commit") == []


def test_a_commit_that_did_not_come_through_is_sent_again(worker: Worker) -> None:
    outcomes = iter([ServerUnavailable("no answer"), CommitReply(1)])
    worker.client.answers["commit"] = lambda message: next(outcomes)
    worker.store(8, [[1, 2]], hashes(10))
    until(lambda: len(worker.client.messages("commit")) == 2)
    first, second = worker.client.messages("commit")
    assert first == second


def test_a_store_by_the_caller_says_what_the_server_has(worker: Worker) -> None:
    assert worker.side.store(store_order(8, [[1, 2, 5, 9]], hashes(10, 11))) == b"\1\1"
    assert not worker.side.storing and worker.ended_stores() == Counter({8: 1})
    (commit,) = worker.client.messages("commit")
    assert (commit.reservation, commit.written) == (5, b"\1\1")
    worker.side.check_idle()
    worker.client.answers["reserve"] = lambda message: RemoteError("bad_request", "no")
    assert worker.side.store(store_order(9, [[1, 2]], hashes(12))) == b""
    worker.side.check_idle()


def test_a_commit_of_the_caller_that_did_not_come_through_is_sent_again(worker: Worker) -> None:
    outcomes = iter([ServerUnavailable("no answer"), CommitReply(1)])
    worker.client.answers["commit"] = lambda message: next(outcomes)
    assert worker.side.store(store_order(8, [[1, 2]], hashes(10))) == b"\0"
    until(lambda: len(worker.client.messages("commit")) == 2)
    first, second = worker.client.messages("commit")
    assert first == second


def test_a_commit_is_sent_again_also_while_orders_never_cease(worker: Worker) -> None:
    lost = iter([ServerUnavailable("no answer")])
    worker.client.answers["commit"] = lambda message: next(lost, CommitReply(1))
    numbers = itertools.count(5)
    worker.client.answers["reserve"] = lambda message: ReserveReply(next(numbers), worker.slots_given[:1].tobytes(), 0)

    def committed_again() -> bool:
        worker.store(8, [[1, 2]], hashes(10))
        worker.ended_stores()
        return [message.reservation for message in worker.client.messages("commit")].count(5) == 2

    until(committed_again)


def test_what_is_unsettled_stays_when_the_server_refuses_another(worker: Worker) -> None:
    answers: dict[int, list[Any]] = {
        5: [ServerUnavailable("no answer"), RemoteError("bad_request", "no")],
        6: [ServerUnavailable("no")],
    }
    worker.client.answers["commit"] = lambda message: (answers[message.reservation] or [CommitReply(1)]).pop(0)
    numbers = itertools.count(5)
    worker.client.answers["reserve"] = lambda message: ReserveReply(next(numbers), worker.slots_given[:1].tobytes(), 0)
    worker.store(1, [[1, 2]], hashes(10))
    worker.store(2, [[1, 2]], hashes(11))
    until(lambda: [message.reservation for message in worker.client.messages("commit")].count(6) == 2)


def test_a_new_server_epoch_gets_new_memory_and_new_chunks(worker: Worker, memory: ServerMemory) -> None:
    worker.fill(1)
    worker.store(1, [[1, 2]], hashes(10))
    worker.ended_stores()
    worker.client.hello = hello(b"epoch-two-epoch-", chunk_tokens=512)
    worker.client.meet(worker.client)
    first, second = worker.client.declared
    assert first.layouts != second.layouts
    worker.store(2, [[1, 2, 3, 4]], hashes(20), server_epoch=b"epoch-two-epoch-")
    worker.ended_stores()
    until(lambda: len(worker.client.messages("commit")) == 2)
    assert worker.client.messages("commit")[1].written == b"\1"


def test_a_server_whose_chunks_do_not_fit_leaves_the_engine_uncached(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.client.hello = hello(b"epoch-two-epoch-", chunk_tokens=200)
    worker.client.meet(worker.client)
    assert "uncached" in caplog.text and "--chunk-size" in caplog.text
    worker.store(2, [[1, 2]], hashes(20), server_epoch=b"epoch-two-epoch-")
    assert worker.ended_stores() == Counter({2: 1})


# ---- over the socket -------------------------------------------------------------------------------------------------
@pytest.fixture
def remote(memory: ServerMemory) -> Iterator[Worker]:
    made = Worker(memory, "socket")
    yield made
    made.side.close()


def stored(worker: Worker, *names: int) -> list[int]:
    """Stores a chunk for each name from blocks of its own; the slots."""
    worker.fill(1)
    worker.store(1, [list(range(1, 1 + 2 * len(names)))], hashes(*names))
    worker.ended_stores()
    until(lambda: len(worker.client.messages("commit")) == 1)
    return list(worker.slots_given[: len(names)])


def test_frames_that_do_not_come_fail_and_are_not_called_corrupt(remote: Worker) -> None:
    slots = stored(remote, 10, 11, 12)

    def read(message: Read) -> ReadReply | Exception:
        return RemoteError("ended", "gone") if message.chunk == 1 else whole(message)

    whole = remote.client.answers["read"]
    remote.client.answers["read"] = read
    remote.load("r", [GroupLoad(0, packed(11, 12, 13, 14, 15, 16))], hashes(10, 11, 12), array("Q", slots * 2))
    assert remote.ended_loads().failed_blocks == {13, 14}
    assert remote.side.report() is None


@pytest.mark.parametrize("short", [0, 4095])
def test_answers_of_another_length_are_no_frames(remote: Worker, short: int) -> None:
    slots = stored(remote, 10)
    remote.client.answers["read"] = lambda message: ReadReply(memoryview(bytes(short)))
    remote.load("r", [GroupLoad(0, packed(3, 4))], hashes(10), array("Q", slots * 2))
    assert remote.ended_loads().failed_blocks == {3, 4}
    assert remote.side.report() is None


def test_when_the_server_goes_every_load_ends(remote: Worker) -> None:
    slots = stored(remote, 10, 11)
    remote.client.answers["read"] = lambda message: ServerUnavailable("the connection broke")
    for name in ("a", "b", "c"):
        remote.load(name, [GroupLoad(0, packed(3, 4, 5, 6))], hashes(10, 11), array("Q", slots * 2))
    assert remote.ended_loads(3).failed_blocks == {3, 4, 5, 6}
    assert remote.side.report() is None


def test_a_store_larger_than_the_staging_arena_goes_in_batches(
    memory: ServerMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_transfer, "PAYLOAD_STAGING_BYTES", 2 * 3 * 40960)  # three frames a half
    worker = Worker(memory, "socket")
    names = tuple(range(10, 18))
    slots = stored(worker, *names)
    assert worker.client.messages("commit")[0].written == b"\1" * 8
    originals = [layer.clone() for layer in worker.layers]
    worker.fill(2)
    worker.load("r", [GroupLoad(0, packed(*range(1, 17)))], hashes(*names), array("Q", slots * 2))
    assert not worker.ended_loads().failed_blocks
    for layer, original in zip(worker.layers, originals, strict=True):
        assert torch.equal(layer[1:17], original[1:17])
    worker.side.close()


def test_a_frame_that_the_server_refuses_is_not_committed(remote: Worker) -> None:
    whole = remote.client.answers["write"]
    remote.client.answers["write"] = lambda message: (
        RemoteError("bad_request", "no") if message.chunk == 0 else whole(message)
    )
    remote.store(3, [[1, 2, 3, 4]], hashes(10, 11))
    assert remote.ended_stores() == Counter({3: 1})
    until(lambda: len(remote.client.messages("commit")) == 1)
    assert remote.client.messages("commit")[0].written == b"\0\1"


def test_a_load_that_comes_while_its_server_is_left_ends(memory: ServerMemory) -> None:
    keeper = threading.Thread(target=lambda: engine.client.meet(engine.client))

    class Queue(queue.SimpleQueue):  # type: ignore[type-arg]
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            if item is not None:  # the next server comes between the look whether the previous is there and this
                keeper.start()
                keeper.join(0.2)
            super().put(item)

    engine = Worker(memory, "socket", environment=EngineEnvironment(queue=Queue))
    engine.load("r", [GroupLoad(0, packed(3, 4))], hashes(10), array("Q", engine.slots_given[:2]))
    assert engine.ended_loads().failed_blocks == {3, 4}
    keeper.join()
    engine.side.close()
