"""A process that stores without end into an fs_native folder with a cap: FOLDER CAP_BYTES STORE_BYTES POLICY.

Says "stored N" for its last line; objects come in three sizes and under many salts, and some are read back on the way.
"""

from __future__ import annotations

import asyncio
import random
import sys

from lmcache.clock import SystemClock
from lmcache.core.limits import GIB
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.frames import FrameMemory, keys, namespace

BATCH = 8
WRITERS = 3
SALTS = 200  # each has folders of its own
SIZES = (61_440, 258_048, 1_044_480)  # payloads: frames of 64 KiB, 256 KiB, 1020 KiB


async def store_until(runner: Runner, left: list[int], number: int) -> int:
    rng = random.Random(number)
    stored = 0
    memories = {size: FrameMemory(BATCH, size) for size in SIZES}
    zeros = {size: bytes(size) for size in SIZES}
    while left[0] > 0:
        size = rng.choice(SIZES)
        memory, seed = memories[size], rng.getrandbits(62)
        left[0] -= BATCH * memory.slot_bytes
        wanted = keys(BATCH, seed, namespace(f"writer {number} size {size}", salt=f"{rng.randrange(SALTS)}"))
        buffers = [memory.fill(slot, key, zeros[size]) for slot, key in enumerate(wanted)]
        outcomes = await runner.store(wanted, buffers, lambda: None)
        stored += sum(outcome is StoreOutcome.STORED for outcome in outcomes)
        if rng.random() < 0.2:
            for outcome in await runner.load(wanted[:2], memory.buffers[:2], lambda: None):
                assert outcome in (LoadOutcome.LOADED, LoadOutcome.MISSING), outcome
    return stored


async def main(folder: str, cap_bytes: int, store_bytes: int, policy: str) -> None:
    spec = {
        "type": "fs_native",
        "base_path": folder,
        "max_capacity_gb": cap_bytes / GIB,
        "eviction": {"eviction_policy": policy},
    }
    runner = Runner(build(parse_adapter(spec, 0)), Metrics().l2, SystemClock())
    await runner.open()
    left = [store_bytes]
    stored = await asyncio.gather(*(store_until(runner, left, number) for number in range(WRITERS)))
    assert await runner.drain(30) and await runner.close(30)
    runner.ledger.check()
    print(f"stored {sum(stored)}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
