"""What tests of media that fail share: a disk that fails on command, and the adapters on it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lmcache.core.key import ObjectKey
from lmcache.core.limits import GIB, L2_BREAKER_MAX_OPEN_SECONDS
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.frames import PAYLOAD_BYTES, FrameMemory, keys
from manual_clock import ManualClock
from services import nixl
from support.raw_devices import META_BYTES, SLOT_BYTES, make_device

COUNT = 8
DEADLINE_SECONDS = 90.0
SHORT_SECONDS = 0.5  # for what stands still
LOADED, MISSING = LoadOutcome.LOADED, LoadOutcome.MISSING
STORED, THERE = StoreOutcome.STORED, StoreOutcome.ALREADY_THERE

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "write-an-adapter.md"


# ---- disks that fail -------------------------------------------------------------------------------------------------
class FaultyDisk:
    """A mounted `fuse_disk`. Skips the test where that cannot be."""

    def __init__(self, folder: Path) -> None:
        if os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
            pytest.skip("needs root and /dev/fuse, to mount a disk that fails")
        self.backing, self.path = folder / "backing", folder / "mounted"
        self.backing.mkdir()
        self.path.mkdir()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "faults.fuse_disk", str(self.backing), str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        if self._line() != "ready":
            reason = self._process.communicate()[1].strip().rpartition("\n")[2]
            pytest.skip(f"a FUSE file system cannot be mounted here: {reason}")

    def _line(self) -> str:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], DEADLINE_SECONDS)[0]:
            self.close()
            pytest.fail("the faulty disk does not answer")
        return self._process.stdout.readline().strip()

    def tell(self, **faults: dict[str, Any]) -> tuple[int, int]:
        """From now on these operations fail, and only these. How many met a fault before, and stood still."""
        assert self._process.stdin is not None
        print(json.dumps(faults), file=self._process.stdin, flush=True)
        met, stalled = self._line().split()
        return int(met), int(stalled)

    def close(self) -> None:
        """Also ends what stands still: the kernel answers it with an error."""
        subprocess.run(["umount", "--force", "--lazy", str(self.path)], check=False)
        self._process.kill()
        self._process.communicate()


@contextmanager
def loop_device(backing: Path, *flags: str) -> Iterator[Path]:
    """A real block device, with its alignment rules, over a file."""
    made = subprocess.run(
        ["losetup", "--direct-io=on", "--show", "-f", *flags, str(backing)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"loop devices cannot be made here: {made.stderr.strip()}")
    try:
        yield Path(made.stdout.strip())
    finally:
        subprocess.run(["losetup", "-d", made.stdout.strip()], check=True)


# ---- what lies on them -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Medium:
    """`spec` gets a folder, or with `is_device` the path of a device."""

    name: str
    spec: Callable[[Path], dict[str, Any]]
    is_device: bool = False

    @contextmanager
    def at(self, folder: Path) -> Iterator[dict[str, Any]]:
        """A specification for one adapter after another in a new folder."""
        folder.mkdir()
        if self.is_device:
            with loop_device(make_device(folder / "device")) as path:
                yield self.spec(path)
        else:
            yield self.spec(folder)


def files(kind: str, **settings: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"type": kind, "base_path": str(folder), **settings}


def nixl_files(kind: str, **settings: Any) -> Callable[[Path], dict[str, Any]]:
    def spec(folder: Path) -> dict[str, Any]:
        nixl.need()
        params = {"file_path": str(folder), "use_direct_io": "true"}
        return {"type": kind, "backend": "POSIX", "backend_params": params, **settings}

    return spec


def raw(**settings: Any) -> Callable[[Path], dict[str, Any]]:
    def spec(path: Path) -> dict[str, Any]:
        device = make_device(path / "device") if path.is_dir() else path
        sizes = {"slot_bytes": SLOT_BYTES, "meta_total_bytes": META_BYTES}
        return {"type": "raw_block", "device_path": str(device), **sizes, **settings}

    return spec


DAX_SLOTS = 64
DAX_BYTES = 8192 + DAX_SLOTS * 128 + 4096 + DAX_SLOTS * (PAYLOAD_BYTES + 4096)


def dax(folder: Path) -> dict[str, Any]:
    (folder / "device").touch()
    sizes = {"max_dax_size_gb": DAX_BYTES / GIB, "slot_bytes": PAYLOAD_BYTES}
    return {"type": "dax", "device_path": str(folder / "device"), **sizes}


def plugin(folder: Path) -> dict[str, Any]:
    """The guide's example: SQLite."""
    module = folder / "sqlite_adapter.py"
    module.write_text(re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0])
    spec = {"type": "plugin", "module_path": str(module), "class_name": "SqliteAdapter"}
    return {**spec, "adapter_params": {"path": str(folder / "kv.sqlite")}}


MEDIA = (
    Medium("fs", files("fs")),
    Medium("fs_native", files("fs_native", use_odirect=True, io_engine="posix")),
    Medium("fs_native_uring", files("fs_native", use_odirect=True, io_engine="io_uring")),
    Medium("raw_file", raw()),
    Medium("raw_file_uring", raw(io_engine="io_uring")),
    Medium("raw_loop", raw(), is_device=True),
    Medium("raw_loop_uring", raw(io_engine="io_uring"), is_device=True),
    Medium("dax", dax),
    Medium("plugin", plugin),
    Medium("nixl_pool", nixl_files("nixl_store", pool_size=4 * COUNT)),
    Medium("nixl_files", nixl_files("nixl_store_dynamic")),
)


# ---- an adapter and its runner ---------------------------------------------------------------------------------------
@dataclass
class RunningAdapter:
    """A runner and its adapter. Whatever it gives out is compared with what was stored."""

    spec: dict[str, Any]
    released: int = 0
    clock: ManualClock = field(default_factory=ManualClock)

    async def __aenter__(self) -> RunningAdapter:
        configured = build(parse_adapter({**self.spec, "timeout_seconds": DEADLINE_SECONDS}, 0))
        self.runner = Runner(configured, Metrics().l2, self.clock)
        await self.runner.open()
        assert await self.runner.wait_for_inventory(DEADLINE_SECONDS)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert await self.runner.drain(DEADLINE_SECONDS) and await self.runner.close(DEADLINE_SECONDS)
        self.runner.ledger.check()

    def be_quick(self) -> None:
        """From now on a deadline is short."""
        self.runner.context.config = replace(self.runner.context.config, timeout_seconds=SHORT_SECONDS)

    async def store(self, seed: int) -> list[StoreOutcome]:
        return await self.runner.store(*self.frames(seed), self._release)

    @staticmethod
    def frames(seed: int) -> tuple[list[ObjectKey], list[memoryview]]:
        wanted, memory = keys(COUNT, seed), FrameMemory(COUNT)
        return wanted, [memory.fill(slot, key) for slot, key in enumerate(wanted)]

    async def load(self, seed: int) -> list[LoadOutcome]:
        """LOADED is exact. What comes wrong is reported to the runner, as the server does, and counts as CORRUPT."""
        wanted, target = keys(COUNT, seed), FrameMemory(COUNT)
        await self.runner.probe(wanted)
        outcomes = await self.runner.load(wanted, target.buffers, self._release)
        for slot, (key, outcome) in enumerate(zip(wanted, outcomes, strict=True)):
            if outcome is LOADED and (fault := target.verify(slot, key)):
                outcomes[slot] = LoadOutcome.CORRUPT
                await self.runner.corrupted([key], fault)
            assert outcomes[slot] is not LOADED or target.holds(slot, key)
        return outcomes

    async def recover(self, seed: int) -> None:
        """Once the medium is well again, everything goes on after a while."""

        async def goes_on() -> bool:
            self.clock.advance(L2_BREAKER_MAX_OPEN_SECONDS)
            stored = await self.store(seed)
            return set(stored) <= {STORED, THERE} and await self.load(seed) == [LOADED] * COUNT

        await until(goes_on)

    def _release(self) -> None:
        self.released += 1


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async def poll() -> None:
        while not await condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), DEADLINE_SECONDS)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * DEADLINE_SECONDS))
