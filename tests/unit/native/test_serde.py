from __future__ import annotations

import gc
import os
import pickle
import select
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache import _native
from lmcache.core.frame import frame_bytes, header_template
from lmcache.core.key import Namespace
from lmcache.testing.frames import FrameMemory
from polling import until

GOLDEN = Path(__file__).parents[2] / "golden" / "serde_v1.bin"
SERVED = Namespace("golden/model", 2, 1, 0, "0123456789abcdef0123456789abcdef", "tenant")
STORED = Namespace("golden/model", 2, 1, 0, "0123456789abcdef0123456789abcdef+exponent", "tenant")
CHUNK_HASH = bytes(range(32))
# 256 elements of a handful of exponents, each with other signs and mantissas, and a tail.
ELEMENTS = [
    (index * 37 % 256 << 8 & 0x8000) | (0x7A + index % 7 - index % 31 // 30 * 90) << 7 | index * 11 % 128
    for index in range(256)
]
PAYLOAD = b"".join(element.to_bytes(2, "little") for element in ELEMENTS) + b"tail!"


def run_one(encodes: bool, source: memoryview, destination: memoryview) -> tuple[int, int]:
    """Bytes written and the fault."""
    chain = _native.SerdeChain("exponent", [_native.exponent_stage(0.0)])
    queue = _native.SerdeQueue(chain, 1)
    templates = _native.frame_template(SERVED.encode(), SERVED.digest, 0) + _native.frame_template(
        STORED.encode(), STORED.digest, 0, "exponent"
    )
    job = queue.submit(encodes, [source], [destination], CHUNK_HASH, templates, array("I", [0]))
    assert select.select([queue.event_fd()], [], [], 30)[0]
    ((reported, sizes, faults),) = queue.drain()
    queue.close()
    assert reported == job
    return sizes[0], faults[0]


def served_frame() -> bytes:
    memory = FrameMemory(1, len(PAYLOAD))
    memory.buffers[0][4096 : 4096 + len(PAYLOAD)] = PAYLOAD
    _native.frame_seal(memory.address(0), header_template(SERVED, len(PAYLOAD)), CHUNK_HASH)
    return bytes(memory.buffers[0])


def test_an_encoded_frame_is_the_golden_file_byte_for_byte() -> None:
    stored = FrameMemory(1, 8192)
    size_bytes, fault = run_one(True, FrameMemory.of(served_frame()), stored.buffers[0])
    assert (size_bytes, fault) == (8192, 0) and stored.buffers[0][:8192] == GOLDEN.read_bytes()


def test_the_golden_file_is_decoded() -> None:
    served = FrameMemory(1, len(PAYLOAD))
    assert run_one(False, FrameMemory.of(GOLDEN.read_bytes()), served.buffers[0]) == (4096 + len(PAYLOAD), 0)
    assert bytes(served.buffers[0]) == served_frame()


def test_every_flipped_byte_of_the_golden_file_is_found() -> None:
    golden = GOLDEN.read_bytes()
    used = 4096 + int.from_bytes(golden[16:24], "little")
    served = FrameMemory(1, len(PAYLOAD))
    for at in range(0, used, 61):
        frame = bytearray(golden)
        frame[at] ^= 4
        assert run_one(False, FrameMemory.of(bytes(frame)), served.buffers[0]) == (0, 1)


LOSSY_STAGES = {
    "fp8": lambda: _native.fp8_stage("e4m3"),
    "fp8-e5m2": lambda: _native.fp8_stage("e5m2"),
    "cachegen": lambda: _native.cachegen_stage(32),
    "cachegen-16": lambda: _native.cachegen_stage(16),
}


@pytest.mark.parametrize("name", LOSSY_STAGES)
def test_what_lossy_stages_make_is_the_golden_file_byte_for_byte(name: str) -> None:
    stage = LOSSY_STAGES[name]()
    payload = PAYLOAD[:512] * 2 + PAYLOAD[512:]
    made = bytearray(stage.max_encoded_bytes(len(payload)))
    golden = (GOLDEN.parent / f"serde_{name}_v1.bin").read_bytes()
    assert stage.encode(payload, made) == (len(golden), b"") and stage.is_lossy
    assert bytes(made[: len(golden)]) == golden
    back = bytearray(len(payload))
    assert stage.decode(golden, back, b"") == "" and bytes(back[1024:]) == b"tail!" and back != payload


def test_a_stage_in_python_sees_memory_that_ends_with_the_call() -> None:
    kept: list[memoryview] = []

    class Greedy:
        def max_encoded_bytes(self, source_bytes: int) -> int:
            return source_bytes

        def encode(self, source: memoryview, destination: memoryview, *_: bytes) -> int:
            kept.extend((source, destination))
            destination[: source.nbytes] = source
            return source.nbytes

    stage = _native.python_stage(Greedy())
    source, destination = bytearray(b"abc"), bytearray(3)
    assert stage.encode(source, destination) == (3, b"") and destination == source
    for view in kept:
        with pytest.raises(ValueError, match="released"):
            view.tobytes()


@pytest.mark.parametrize("keep", [lambda view: view[1:], memoryview, lambda view: view.cast("c"), pickle.PickleBuffer])
@pytest.mark.parametrize("kept_of", ["source", "destination"])
def test_a_stage_in_python_that_keeps_a_part_of_the_memory_has_failed(
    keep: Callable[[memoryview], object], kept_of: str
) -> None:
    class Greedy:
        def __init__(self) -> None:
            self.told = 0
            self.parts: list[object] = []

        def max_encoded_bytes(self, source_bytes: int) -> int:
            return source_bytes

        def encode(self, source: memoryview, destination: memoryview, *_: bytes) -> int:
            self.parts.append(keep(destination if kept_of == "destination" else source))
            return 3

        def decode(self, source: memoryview, destination: memoryview, *_: bytes) -> bool:
            return bool(self.encode(source, destination))

        def kept(self) -> None:
            self.told += 1

    greedy = Greedy()
    stage = _native.python_stage(greedy)
    with pytest.raises(RuntimeError, match="kept memory"):
        stage.encode(b"abc", bytearray(3))
    assert greedy.told == 1
    with pytest.raises(RuntimeError, match="kept memory"):
        stage.decode(b"abc", bytearray(3), b"")
    greedy.parts.clear()
    assert greedy.told == 2


def test_a_queue_that_is_dropped_ends_its_threads_while_they_are_in_python() -> None:
    class Slow:
        def max_encoded_bytes(self, source_bytes: int) -> int:
            return source_bytes

        def encode(self, *_: object) -> None:
            gc.collect()

    chain = _native.SerdeChain("slow", [_native.python_stage(Slow())])
    queue = _native.SerdeQueue(chain, 4)
    frame = FrameMemory.of(served_frame())
    targets = [FrameMemory(1, 8192).buffers[0] for _ in range(20)]
    templates = 2 * _native.frame_template(SERVED.encode(), SERVED.digest, 0)
    queue.submit(True, [frame] * 20, targets, CHUNK_HASH * 20, templates, array("I", [0] * 20))
    del queue
    assert all(target[:8] == b"LMCFRAME" for target in targets)


def test_frames_are_encoded_while_python_runs_and_with_less_priority() -> None:
    """This thread keeps the interpreter: it makes no call that gives it up, and is not asked to."""
    before = set(os.listdir("/proc/self/task"))
    chain = _native.SerdeChain("exponent", [_native.exponent_stage(0.0)])
    queue = _native.SerdeQueue(chain, 2)
    frame, target = FrameMemory.of(served_frame()), FrameMemory(1, 8192).buffers[0]
    templates = 2 * _native.frame_template(SERVED.encode(), SERVED.digest, 0)
    end, interval = time.monotonic() + 20, sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        queue.submit(True, [frame], [target], CHUNK_HASH, templates, array("I", [0]))
        while target[:8] != b"LMCFRAME" and time.monotonic() < end:
            pass
        assert target[:8] == b"LMCFRAME"
    finally:
        sys.setswitchinterval(interval)
    threads = [int(name) for name in set(os.listdir("/proc/self/task")) - before]
    wanted = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    until(lambda: [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads] == [wanted] * 2)
    queue.close()


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="path must be one that this CPU can run"):
        _native.exponent_stage(0.1, "mmx")
    with pytest.raises(ValueError, match="format must be e4m3 or e5m2"):
        _native.fp8_stage("e4m3fn")
    with pytest.raises(ValueError, match="bins must be 16 or 32"):
        _native.cachegen_stage(64)
    with pytest.raises(ValueError, match="level must be between 0 and 19"):
        _native.zstd_stage(20, 0.1)
    stage = _native.exponent_stage(0.1)
    with pytest.raises(ValueError, match="max_encoded_bytes"):
        stage.encode(bytes(4096), bytearray(100))
    assert stage.decode(b"", bytearray(4096), b"") == "corrupt"
    assert _native.zstd_refusal() == "" and frame_bytes(1) == 8192
