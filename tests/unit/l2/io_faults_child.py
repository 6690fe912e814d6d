"""Runs fs_native on the disk of io_faults.c and prints what came of each fault. Arguments: folder, O_DIRECT or not."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path

from lmcache.l2.adapter import Adapter
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.testing.contract_run import RecordingInventory
from lmcache.testing.frames import FrameMemory, keys

COUNT = 8
READ_FAULTS, WRITE_FAULTS = "ESIZF3", "ENSIT3"


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def set_fault(which: int, fault: str) -> None:
    with open(os.environ["IO_FAULTS"], "r+b") as file:
        file.seek(which)
        file.write(fault.encode() or b"\0")


async def load(adapter: Adapter) -> list[str]:
    """The outcome of each object; for what was loaded whether its bytes are right."""
    target, wanted = FrameMemory(COUNT), keys(COUNT)
    outcomes = await adapter.load(wanted, target.buffers)
    return [
        ("whole" if target.holds(slot, wanted[slot]) else f"wrong {target.verify(slot, wanted[slot])}")
        if outcome.name == "LOADED"
        else outcome.name
        for slot, outcome in enumerate(outcomes)
    ]


async def store(adapter: Adapter) -> list[str]:
    memory, wanted = FrameMemory(COUNT), keys(COUNT)
    return [o.name for o in await adapter.store(wanted, [memory.fill(i, key) for i, key in enumerate(wanted)])]


async def case(base: Path, which: int, fault: str, direct: bool) -> dict[str, object]:
    warnings = Warnings()
    logging.getLogger("lmcache.l2").addHandler(warnings)
    spec = {"type": "fs_native", "base_path": str(base), "num_workers": 1, "use_odirect": direct, "io_engine": "posix"}
    adapter, inventory = build(parse_adapter(spec, 0)).adapter, RecordingInventory()
    await adapter.open(inventory)
    await inventory.completed.wait()
    if which == 0:
        await store(adapter)
    set_fault(which, fault)
    during = await (store(adapter) if which else load(adapter))
    again = await (store(adapter) if which else load(adapter)) if fault == "E" else []
    set_fault(which, "")
    left = sorted(path.suffix for path in base.rglob("*.tmp"))
    seen = await load(adapter) if which else []
    after = await (store(adapter) if which else load(adapter))
    await adapter.close()
    logging.getLogger("lmcache.l2").removeHandler(warnings)
    return {
        "during": during,
        "again": again,
        "temporary": left,
        "seen": seen,
        "after": after,
        "warnings": warnings.messages,
    }


def main() -> None:
    folder, direct = Path(sys.argv[1]), sys.argv[2] == "direct"
    results = {}
    for which, faults in enumerate((READ_FAULTS, WRITE_FAULTS)):
        for fault in faults:
            name = f"{'read' if which == 0 else 'write'} {fault}"
            results[name] = asyncio.run(case(folder / name.replace(" ", "_"), which, fault, direct))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
