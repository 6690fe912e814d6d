"""The serdes: ratio, and GB/s of one thread's own time, on random bfloat16 and on the KV of a real model.

--kv FILE holds raw bfloat16, as `real_model.py --kv FILE` writes it; without one, only random numbers are encoded.
Speeds count bytes before encoding, on one core, beside a plain copy in the same run.
"""

from __future__ import annotations

import math
import mmap
import random
import statistics
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lmcache import _native
from lmcache.core.limits import MIB
from measure import Result, command_line, report

STAGES: dict[str, Callable[[], _native.SerdeStage]] = {
    "exponent": lambda: _native.exponent_stage(0.0),
    "zstd": lambda: _native.zstd_stage(0, 0.0),
    "zstd, level 1": lambda: _native.zstd_stage(1, 0.0),
    "zstd, level 3": lambda: _native.zstd_stage(3, 0.0),
    "fp8": lambda: _native.fp8_stage("e4m3"),
    "fp8, e5m2": lambda: _native.fp8_stage("e5m2"),
    "cachegen": lambda: _native.cachegen_stage(32),
    "cachegen, 16 bins": lambda: _native.cachegen_stage(16),
    "aesgcm, 128 bits": lambda: _native.aesgcm_stage(_native.ObjectCipher([bytes(32)], 128)),
    "aesgcm, 256 bits": lambda: _native.aesgcm_stage(_native.ObjectCipher([bytes(32)], 256)),
}


def gaussian(size_bytes: int) -> bytes:
    """bfloat16 of a standard normal distribution; a MiB, again and again: nothing here looks that far back."""
    rng = random.Random(1)
    numbers = [rng.gauss(0, 1) for _ in range(min(size_bytes, MIB) // 2)]
    packed = struct.pack(f"<{len(numbers)}f", *numbers)
    once = b"".join(packed[at + 2 : at + 4] for at in range(0, len(packed), 4))
    return (once * (size_bytes // len(once) + 1))[:size_bytes]


def gb_per_second(call: Callable[[], object], size_bytes: int, runs: int) -> float:
    """The median. Of the thread's own time: others on the machine do not count."""
    seconds = []
    for _ in range(runs + 1):
        started = time.thread_time()
        call()
        seconds.append(time.thread_time() - started)
    return size_bytes / statistics.median(seconds[1:]) / 1e9


def measure(name: str, payload: bytes, runs: int) -> list[Result]:
    """ValueError where decoding does not give the payload back, or, of what is lossy, not always the same."""
    size_bytes = len(payload)
    source, back = mmap.mmap(-1, size_bytes), mmap.mmap(-1, size_bytes)
    source[:] = payload
    to, from_ = (_native.buffer_address(memoryview(memory)) for memory in (back, source))
    copy = partial(_native.copy_plain, to, from_, size_bytes, "memcpy")
    results = [Result(f"{name}: memcpy", gb_per_second(copy, size_bytes, runs), "GB/s")]
    for serde, make in STAGES.items():
        stage = make()
        encoded = mmap.mmap(-1, stage.max_encoded_bytes(size_bytes))
        written = stage.encode(source, encoded)
        if written is None:
            results.append(Result(f"{name}: {serde}", 1.0, "raw / stored", detail="nothing to gain"))
            continue
        stored = memoryview(bytes(memoryview(encoded)[: written[0]]))  # the next one may be other bytes
        encode, decode = partial(stage.encode, source, encoded), partial(stage.decode, stored, back, written[1])
        results += [
            Result(f"{name}: {serde}", size_bytes / stored.nbytes, "raw / stored", detail=f"{stored.nbytes} bytes"),
            Result(f"{name}: {serde}, encode", gb_per_second(encode, size_bytes, runs), "GB/s"),
            Result(f"{name}: {serde}, decode", gb_per_second(decode, size_bytes, runs), "GB/s"),
        ]
        if decode() != "" or not (is_stable(stage, back) if stage.is_lossy else back[:] == payload):
            raise ValueError(f"{serde} lost the payload")
        if stage.is_lossy:
            results.append(Result(f"{name}: {serde}, error", relative_error(payload, back[:]), "of the RMS"))
    return results


def values(payload: bytes) -> tuple[float, ...]:
    widened = b"".join(b"\0\0" + payload[at : at + 2] for at in range(0, len(payload), 2))
    return struct.unpack(f"<{len(payload) // 2}f", widened)


def relative_error(payload: bytes, decoded: bytes) -> float:
    """Root of the mean square of the error, of that of the values; of a MiB."""
    exact, near = values(payload[:MIB]), values(decoded[:MIB])
    lost = sum((a - b) ** 2 for a, b in zip(exact, near, strict=True))
    return math.sqrt(lost / sum(a * a for a in exact))


def is_stable(stage: _native.SerdeStage, decoded: mmap.mmap) -> bool:
    """Whether what came back comes back as it is, encoded once more."""
    encoded, again = mmap.mmap(-1, stage.max_encoded_bytes(len(decoded))), mmap.mmap(-1, len(decoded))
    written = stage.encode(decoded, encoded)
    if written is None:
        return False
    return stage.decode(memoryview(encoded)[: written[0]], again, written[1]) == "" and again[:] == decoded[:]


def main() -> int:
    parser = command_line(__doc__, runs=20)
    parser.add_argument("--kv", type=Path, help="raw bfloat16 KV of a model")
    parser.add_argument("--mib", type=float, default=4, help="size of an object (default: %(default)s)")
    arguments = parser.parse_args()
    size_bytes = int(arguments.mib * MIB)
    results = measure("random normal", gaussian(size_bytes), arguments.runs)
    if arguments.kv is not None:
        results += measure(arguments.kv.name, arguments.kv.read_bytes()[:size_bytes], arguments.runs)
    return report(results, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
