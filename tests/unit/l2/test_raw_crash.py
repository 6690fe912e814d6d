"""raw_block after a crash: what was confirmed is there, what was deleted is gone, and nothing is wrong.

A copy of the device while a server works on it is what a kill at that moment leaves. TEST_RAW_STEPS and
TEST_RAW_KILLS make the runs longer.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.testing.frames import keys, namespace
from seeds import SEED
from support.raw_devices import RawServer, make_device

STEPS = int(os.environ.get("TEST_RAW_STEPS", "300"))
KILLS = int(os.environ.get("TEST_RAW_KILLS", "3"))
SLOTS = 40


async def check_copy(device: Path, must: set[ObjectKey], may: set[ObjectKey]) -> None:
    """The copy holds all of `must` and nothing beyond `may`, and everything that it claims verifies. A copy that was
    taken while a page of the table was written may hold what was deleted long ago: that is read from the slots then."""
    copy = device.with_name("copy")
    copy.write_bytes(device.read_bytes())
    async with RawServer(copy, use_odirect=False, meta_verify_on_load=False) as server:
        claimed = list(server.inventory.objects)
        assert must <= set(claimed) <= may
        assert set(await server.load(claimed)) <= {LoadOutcome.LOADED}


@pytest.mark.parametrize("seed", [SEED, SEED + 1])
def test_copies_at_random_moments(tmp_path: Path, seed: int) -> None:
    device = make_device(tmp_path / "device", SLOTS)

    async def test() -> None:
        chance = random.Random(seed)
        universe = [key for salt in "ab" for key in keys(40, of=namespace(salt=salt))]
        model: set[ObjectKey] = set()
        settings = {"io_engine": chance.choice(["posix", "io_uring"]), "use_odirect": False}
        server = await RawServer(device, **settings).__aenter__()
        try:
            for _ in range(STEPS):
                act = chance.random()
                some = chance.sample(universe, chance.randint(1, 8))
                if act < 0.45:
                    operation = asyncio.ensure_future(server.store(some))
                    if chance.random() < 0.2:  # crash while it runs
                        for _ in range(chance.randint(0, 6)):
                            await asyncio.sleep(0)
                        await check_copy(device, model, set(universe))
                    for key, outcome in zip(some, await operation, strict=True):
                        assert outcome is not StoreOutcome.FAILED
                        if outcome is not StoreOutcome.FULL:
                            model.add(key)
                elif act < 0.75:
                    deletion = asyncio.ensure_future(server.adapter.delete(some))
                    if chance.random() < 0.2:
                        for _ in range(chance.randint(0, 4)):
                            await asyncio.sleep(0)
                        await check_copy(device, model - set(some), set(universe))
                    await deletion
                    model -= set(some)
                elif act < 0.95:
                    for key, loaded in zip(some, await server.load(some), strict=True):
                        assert loaded is (LoadOutcome.LOADED if key in model else LoadOutcome.MISSING)
                elif act < 0.97:
                    await server.adapter.clear()
                    model.clear()
                elif act < 0.99:
                    await check_copy(device, model, model)
                else:
                    await server.adapter.close()
                    server = await RawServer(device, **settings).__aenter__()
                    assert set(server.inventory.objects) == model
        finally:
            await server.adapter.close()

    asyncio.run(asyncio.wait_for(test(), 600))


WRITER = """
import asyncio, sys
from pathlib import Path
from lmcache.core.outcome import StoreOutcome
from lmcache.testing.frames import keys
from support.raw_devices import RawServer

async def main(path, engine):
    async with RawServer(Path(path), io_engine=engine) as server:
        for batch in range(10_000):
            wanted = keys(16, seed=batch)
            await server.adapter.delete(keys(16, seed=batch - 2))
            assert await server.store(wanted) == [StoreOutcome.STORED] * 16
            print(batch, flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


@pytest.mark.parametrize("engine", ["posix", "io_uring"])
def test_killed_writers(tmp_path: Path, engine: str) -> None:
    """What a writer confirmed before kill -9 is there; of the batch under way there is a prefix."""
    chance = random.Random(KILLS)

    async def check(device: Path, last: int) -> None:
        async with RawServer(device) as server:
            held = set(server.inventory.objects)
            assert held >= set(keys(16, seed=last))
            under_way = [key in held for key in keys(16, seed=last + 1)]
            assert under_way == sorted(under_way, reverse=True)
            everything = list(held)
            assert set(await server.load(everything)) == {LoadOutcome.LOADED}

    for number in range(KILLS):
        device = make_device(tmp_path / f"device{number}", 40)
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(device), engine],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            assert writer.stdout is not None
            last = -1
            for _ in range(chance.randint(1, 20)):
                last = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
            rest = writer.stdout.read().split()
            last = int(rest[-1]) if rest else last
        finally:
            writer.kill()
            writer.communicate()
        asyncio.run(asyncio.wait_for(check(device, last), 60))
