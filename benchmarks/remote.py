"""The adapters of remote tiers beside a plain program on the same library.

    python benchmarks/remote.py [PART ...] [--folder FOLDER] [--rounds N] [--small]

`nixl`: `nixl_store` on files beside a program that does nothing but post the same bytes to NIXL's POSIX plugin, through
the page cache and past it. `s3`: `s3` on SeaweedFS beside a plain awscrt program (remote_s3.py). `resp`: `resp` on
Valkey beside redis-benchmark and redis-py (remote_resp.py). `mooncake`: `mooncake_store` beside a client of Mooncake
that moves all objects in one batch, both to and from the memory of another process. All move objects of 4 MiB, in
turns; target: 95% of the plain program, 90% for Mooncake, for `resp` 80% of redis-benchmark and twice redis-py.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from lmcache import _native
from lmcache.cli.bench_plain_mooncake import PlainMooncake
from lmcache.cli.bench_timing import Region, timed
from lmcache.clock import SystemClock
from lmcache.core.frame import header_template
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES, L2_LOAD_BATCH_BYTES, L2_STORE_BATCH_BYTES
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.l2.adapters import nixl_agent
from lmcache.l2.adapters.mooncake_config import MooncakeConfig
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from measure import MIB, Result, at_least, command_line, report, spread
from remote_resp import resp
from remote_s3 import TESTS, s3

NAMESPACE = Namespace("bench", 1, 0, 0, "0" * 32)


class Frames:
    """Whole frames side by side in memory like L1's."""

    def __init__(self, count: int, frame_bytes: int) -> None:
        self.frame_bytes = frame_bytes
        self.region = Region(count * frame_bytes)
        whole = memoryview(self.region.map)
        self.views = [whole[at * frame_bytes : (at + 1) * frame_bytes] for at in range(count)]
        template = header_template(NAMESPACE, frame_bytes - FRAME_HEADER_BYTES)
        self.keys = [ObjectKey(NAMESPACE, os.urandom(32)) for _ in range(count)]
        for at, key in enumerate(self.keys):
            _native.frame_seal(self.region.address + at * frame_bytes, template, key.chunk_hash)

    @property
    def size_bytes(self) -> int:
        return len(self.views) * self.frame_bytes


async def in_batches(
    frames: Frames,
    batch_bytes: int,
    operation: Callable[[Sequence[ObjectKey], Sequence[memoryview], Callable[[], None]], Awaitable[Sequence[object]]],
    expected: object,
) -> float:
    """Seconds that all frames take, every batch at once, as the storage loop would have it."""
    at_once = max(1, batch_bytes // frames.frame_bytes)
    started = time.perf_counter()
    outcomes = await asyncio.gather(
        *(
            operation(frames.keys[at : at + at_once], frames.views[at : at + at_once], lambda: None)
            for at in range(0, len(frames.keys), at_once)
        )
    )
    seconds = time.perf_counter() - started
    assert all(outcome is expected for batch in outcomes for outcome in batch)
    return seconds


class PlainNixl:
    """A program without an adapter: an agent, files that are open and registered, a transfer for all of them."""

    def __init__(self, folder: Path, frames: Frames, direct: bool) -> None:
        nixl = self._nixl = nixl_agent.load_bindings("benchmark")
        self._agent = nixl.nixlAgent("plain", nixl.nixlAgentConfig(False, False, 0, nixl.NIXL_THREAD_SYNC_NONE))
        self._backend = self._agent.createBackend("POSIX", {})
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        folder.mkdir()
        self._fds = [os.open(folder / f"{at}", flags) for at in range(len(frames.views))]
        memory, size_bytes = frames.region.address, frames.frame_bytes
        self._register(nixl.DRAM_SEG, [(memory, frames.size_bytes, 0, "")])
        self._register(nixl.FILE_SEG, [(0, size_bytes, fd, "") for fd in self._fds])
        self._local = [(memory + at * size_bytes, size_bytes, 0) for at in range(len(self._fds))]
        self._remote = [(0, size_bytes, fd) for fd in self._fds]

    def _register(self, kind: Any, descriptors: list[tuple[int, int, int, str]]) -> None:
        self._agent.registerMem(self._nixl.nixlRegDList(kind, descriptors), [self._backend])

    def move(self, operation: str) -> float:
        nixl = self._nixl
        started = time.perf_counter()
        handle = self._agent.createXferReq(
            nixl.NIXL_WRITE if operation == "store" else nixl.NIXL_READ,
            nixl.nixlXferDList(nixl.DRAM_SEG, self._local),
            nixl.nixlXferDList(nixl.FILE_SEG, self._remote),
            "plain",
            "",
            [self._backend],
        )
        status = self._agent.postXferReq(handle)
        while status == nixl.NIXL_IN_PROG:
            time.sleep(20e-6)
            status = self._agent.getXferStatus(handle)
        self._agent.releaseXferReq(handle)
        assert status == nixl.NIXL_SUCCESS
        return time.perf_counter() - started

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


async def nixl(folder: Path, rounds: int, small: bool) -> list[Result]:
    results = []
    for direct in (False, True):
        (folder / f"nixl-{direct}").mkdir()
        results += await _nixl(folder / f"nixl-{direct}", rounds, direct, frame_bytes=(MIB // 4 if small else 4 * MIB))
    return results


async def _nixl(folder: Path, rounds: int, direct: bool, frame_bytes: int) -> list[Result]:
    frames = Frames(L2_STORE_BATCH_BYTES // (4 * MIB), frame_bytes)
    params = {"file_path": str(folder / "ours"), "use_direct_io": str(direct).lower()}
    spec = {"type": "nixl_store", "backend": "POSIX", "pool_size": len(frames.keys), "backend_params": params}
    runner = Runner(build(parse_adapter(spec, 0)), Metrics().l2, SystemClock())
    runner.lend_memory(frames.region.address, frames.size_bytes)
    await runner.open()
    plain = PlainNixl(folder / "plain", frames, direct)
    seconds: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 2):  # the first two touch every file once
        for operation in ("store", "load"):
            for program in ("plain", "ours") if number % 2 else ("ours", "plain"):
                if program == "plain":
                    took = plain.move(operation)
                elif operation == "store":
                    took = await in_batches(frames, L2_STORE_BATCH_BYTES, runner.store, StoreOutcome.STORED)
                else:
                    took = await in_batches(frames, L2_LOAD_BATCH_BYTES, runner.load, LoadOutcome.LOADED)
                if number > 1:
                    seconds.setdefault((operation, program), []).append(took)
        await runner.delete(frames.keys)  # as eviction does it, so that both write files that are there
    plain.close()
    assert await runner.drain(10) and await runner.close(10)
    kind = "O_DIRECT" if direct else "page cache"
    return [_result(f"nixl_store, {kind}, {operation}", operation, seconds, frames) for operation in ("store", "load")]


async def mooncake(folder: Path, rounds: int, small: bool) -> list[Result]:
    sys.path.append(str(TESTS))  # the service is that of the tests
    from services.mooncake import Master, Peer, setup_keys

    frames = Frames(L2_STORE_BATCH_BYTES // (4 * MIB), MIB // 4 if small else 4 * MIB)
    seconds: dict[tuple[str, str], list[float]] = {}
    with Master(folder) as master, Peer(folder, master, 4 * frames.size_bytes) as peer:
        master.wait_ready()
        peer.wait_ready()
        config = parse_adapter({"type": "mooncake_store", **setup_keys(master, 0)}, 0)
        assert isinstance(config, MooncakeConfig)
        runner = Runner(build(config), Metrics().l2, SystemClock())
        runner.lend_memory(frames.region.address, frames.size_bytes)
        await runner.open()
        plain = PlainMooncake(config)
        for number in range(rounds + 1):  # the first one warms up
            for program in ("plain", "ours") if number % 2 else ("ours", "plain"):
                if program == "plain":
                    took = [timed(lambda: plain.write(frames.views)), timed(lambda: plain.read(frames.views))]
                    plain.clean_up()
                else:
                    took = [await in_batches(frames, L2_STORE_BATCH_BYTES, runner.store, StoreOutcome.STORED)]
                    took.append(await in_batches(frames, L2_LOAD_BATCH_BYTES, runner.load, LoadOutcome.LOADED))
                    await runner.clear()
                for operation, each in zip(("store", "load"), took, strict=True):
                    if number:
                        seconds.setdefault((operation, program), []).append(each)
        plain.close()
        assert await runner.drain(10) and await runner.close(30)
    return [_result(f"mooncake_store, {operation}", operation, seconds, frames, 0.9) for operation in ("store", "load")]


def _result(
    name: str, operation: str, seconds: dict[tuple[str, str], list[float]], frames: Frames, target: float = 0.95
) -> Result:
    ours, plain = seconds[operation, "ours"], seconds[operation, "plain"]
    ratio = statistics.median(plain) / statistics.median(ours)
    figures = [frames.size_bytes / statistics.median(values) / 1e9 for values in (ours, plain)]
    detail = f"{figures[0]:.2f} GB/s, plain {figures[1]:.2f}; ms {spread(ours, 1e3)}, plain {spread(plain, 1e3)}"
    return at_least(f"{name} of {frames.frame_bytes // MIB or 0.25:g} MiB", ratio, "of plain", target, detail)


PARTS = {"nixl": nixl, "resp": resp, "s3": s3, "mooncake": mooncake}


def main() -> int:
    parser = command_line(__doc__, rounds=9, on_disk=True)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", help=", ".join(PARTS))
    options = parser.parse_args()
    results = []
    for part in options.parts or PARTS:
        folder = Path(tempfile.mkdtemp(prefix="lmcache-bench-remote-", dir=options.folder))
        try:
            results += asyncio.run(PARTS[part](folder, 1 if options.small else options.rounds, options.small))
        finally:
            shutil.rmtree(folder)
    return report(results, options.json)


if __name__ == "__main__":
    sys.exit(main())
