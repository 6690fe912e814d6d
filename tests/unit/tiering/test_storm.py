"""Everything at once, from a seed: whatever happens, a hit has the right bytes and nothing stays taken.
TEST_STORM_SECONDS of it."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from pathlib import Path

import pytest

from lmcache.core.limits import GIB
from lmcache.core.outcome import StoreOutcome
from lmcache.l2.adapter_types import build as build_adapter
from lmcache.l2.adapter_types import parse_adapter
from polling import until
from unit.tiering.support import FRAME_BYTES, Rig, faulty, keys, open_rig

PROMPTS = 24
SECONDS = float(os.environ.get("TEST_STORM_SECONDS", "2"))


def client(rig: Rig, seed: int, deadline: float, hits: list[int], wrong: list[str]) -> None:
    dice = random.Random(seed)
    while time.monotonic() < deadline:
        prompt = keys(dice.randrange(8, 60), seed=dice.randrange(PROMPTS))
        if dice.random() < 0.5:
            rig.put(prompt)
            continue
        answers, cancel = rig.begin_fetch(prompt, deadline_seconds=dice.choice([0.002, 0.05, 20.0]))
        if dice.random() < 0.1:
            cancel()
        result = answers.get(timeout=30)
        hits.append(result.chunks)
        if not rig.holds(result, prompt):
            wrong.append(f"client {seed}: {result}")
        rig.l1.core.release(result.lease)


@pytest.mark.parametrize("policies", [("default", "default"), ("default", "retain"), ("skip_l1", "default")])
def test_storm(tmp_path: Path, policies: tuple[str, str]) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    capped = {
        "type": "fs_native",
        "base_path": str(tmp_path),
        "max_capacity_gb": (6 << 20) / GIB,
        "eviction": {"eviction_policy": "LRU", "trigger_watermark": 0.8, "eviction_ratio": 0.3},
    }
    second, shaky = faulty(index=1)
    first = build_adapter(parse_adapter(capped, 0))
    with open_rig(
        [first, second],
        slots=400,
        store_policy=policies[0],
        prefetch_policy=policies[1],
        prefetch_max_in_flight=3,
        eviction_watermark=0.7,
    ) as rig:
        deadline = time.monotonic() + SECONDS
        hits: list[int] = []
        wrong: list[str] = []
        threads = [threading.Thread(target=client, args=(rig, seed + i, deadline, hits, wrong)) for i in range(4)]
        for thread in threads:
            thread.start()
        while time.monotonic() < deadline:
            time.sleep(0.02)
            match dice.randrange(6):
                case 0:
                    # os.walk passes over folders that are removed while it looks.
                    files = [
                        Path(folder, name)
                        for folder, _, names in os.walk(tmp_path)
                        for name in names
                        if name.endswith(".data") and "quarantine" not in folder
                    ]
                    for path in dice.sample(files, min(3, len(files))):
                        flip(path, dice.randrange(FRAME_BYTES))
                case 1:
                    rig.storage.call_soon(shaky.gate.clear)
                case 2:
                    rig.storage.call_soon(shaky.gate.set)
                case 3:
                    shaky.store_outcome = dice.choice([None, StoreOutcome.FULL, StoreOutcome.FAILED])
                case 4:
                    shaky.flip = dice.choice([0, 0, 1])
                case 5:
                    shaky.raises = dice.choice([None, None, OSError("fault")])
        shaky.raises = None
        rig.storage.call_soon(shaky.gate.set)
        for thread in threads:
            thread.join(60)
        assert not wrong
        assert sum(hits) > 0
        assert rig.storage.flush(30)
        until(rig.idle)
        assert int(subprocess.run(["du", "-s", "-B1", tmp_path], stdout=subprocess.PIPE).stdout.split()[0]) <= 6 << 20
        rig.storage.clear("all")
        assert rig.l1.core.stats()["objects"] == 0


def flip(path: Path, at: int) -> None:
    try:
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]) if byte else b"")
    except FileNotFoundError:
        pass
