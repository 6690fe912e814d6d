"""`resp` beside redis-benchmark with the same value size and number of connections, and beside redis-py with hiredis on
as many threads. Each has turns with the others; a ratio is that of two medians."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from lmcache import _native
from lmcache.cli.bench_timing import Region
from lmcache.core.frame import header_template
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapter import NO_FOLDERS, Adapter
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.testing.processes import LOOPBACK
from measure import Result, at_least, spread

TESTS = Path(__file__).resolve().parents[1] / "tests"
VALUE_BYTES = 4 << 20
CLIENTS = 4
NAMESPACE = Namespace("bench", 1, 0, 0, "0" * 32)
# As the storage loop does it: L2_STORE_BATCH_BYTES, L2_LOAD_BATCH_BYTES, and so many at once.
STORE_BATCH, STORES_AT_ONCE = 16, 2
LOAD_BATCH, LOADS_AT_ONCE = 4, 8


class _Quiet:
    """An inventory that nobody reads."""

    def found(self, objects: object, *, newer: bool = False) -> None: ...
    def begin_scan(self) -> int:
        return 0

    def seen(self, digest: bytes, hashes: bytes) -> None: ...
    def known(
        self, *, unseen_by: int | None = None, passed_over: Mapping[bytes, int] = NO_FOLDERS
    ) -> Iterator[list[ObjectKey]]:
        return iter(())

    def lost(self, keys: Sequence[ObjectKey]) -> None: ...
    def complete(self) -> None: ...


class Ours:
    def __init__(self, port: int, count: int) -> None:
        region = Region(count * VALUE_BYTES)
        self._buffers = region.pieces(VALUE_BYTES)
        self._keys = [ObjectKey(NAMESPACE, index.to_bytes(32, "big")) for index in range(count)]
        template = header_template(NAMESPACE, VALUE_BYTES - FRAME_HEADER_BYTES)
        content = os.urandom(VALUE_BYTES)
        for key, buffer in zip(self._keys, self._buffers, strict=True):
            buffer[:] = content
            _native.frame_seal(_native.buffer_address(buffer), template, key.chunk_hash)
        spec = {"type": "resp", "host": LOOPBACK, "port": port, "num_workers": CLIENTS}
        self.adapter: Adapter = build(parse_adapter(spec, 0)).adapter

    async def store(self) -> float:
        """Bytes a second, of objects that are not there."""
        await self.adapter.clear()
        return await self._in_batches(self.adapter.store, STORE_BATCH, STORES_AT_ONCE, StoreOutcome.STORED)

    async def load(self) -> float:
        return await self._in_batches(self.adapter.load, LOAD_BATCH, LOADS_AT_ONCE, LoadOutcome.LOADED)

    async def _in_batches(
        self,
        move: Callable[[Sequence[ObjectKey], Sequence[memoryview]], Awaitable[Iterable[object]]],
        size: int,
        at_once: int,
        expected: object,
    ) -> float:
        turns = asyncio.Semaphore(at_once)

        async def move_from(start: int) -> None:
            async with turns:
                chosen = slice(start, start + size)
                outcomes = await move(self._keys[chosen], self._buffers[chosen])
                assert set(outcomes) == {expected}, outcomes

        began = time.perf_counter()
        await asyncio.gather(*(move_from(start) for start in range(0, len(self._keys), size)))
        return len(self._keys) * VALUE_BYTES / (time.perf_counter() - began)


def redis_benchmark(program: Path, environment: dict[str, str], port: int, count: int, test: str) -> float:
    """Bytes a second."""
    command = [str(program), "-h", LOOPBACK, "-p", str(port), "-c", str(CLIENTS), "-n", str(count), "-r", str(count)]
    done = subprocess.run(
        [*command, "-d", str(VALUE_BYTES), "-t", test, "--csv"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    _, requests_per_second, *_ = done.stdout.strip().splitlines()[-1].replace('"', "").split(",")
    return float(requests_per_second) * VALUE_BYTES


def redis_py(port: int, count: int, test: str) -> float | None:
    """Bytes a second, a thread and a connection for each client; None where the package is not installed."""
    try:
        import hiredis
        import redis
    except ImportError:
        return None
    assert hiredis.__version__
    value = os.urandom(VALUE_BYTES)
    clients = [redis.Redis(LOOPBACK, port) for _ in range(CLIENTS)]

    def work(client: redis.Redis, first: int) -> None:
        for index in range(first, count, CLIENTS):
            name = f"plain:{index}"
            if test == "set":
                client.set(name, value)
            else:
                got = client.get(name)
                assert got is not None and len(got) == VALUE_BYTES

    threads = [threading.Thread(target=work, args=(client, first)) for first, client in enumerate(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    for client in clients:
        client.close()
    return count * VALUE_BYTES / seconds


async def resp(folder: Path, rounds: int, small: bool) -> list[Result]:
    sys.path.append(str(TESTS))  # the service is that of the tests
    from services import debian_environment
    from services.redis import REDIS_BENCHMARK, Valkey

    with Valkey(folder / "valkey") as server:
        server.wait_ready()
        return await _rounds(server.port, rounds, 8 if small else 48, REDIS_BENCHMARK, debian_environment())


async def _rounds(port: int, rounds: int, count: int, program: Path, environment: dict[str, str]) -> list[Result]:
    ours = Ours(port, count)
    await ours.adapter.open(_Quiet())
    speeds: dict[tuple[str, str], list[float]] = {}

    def note(which: str, act: str, speed: float | None) -> None:
        if speed is not None:
            speeds.setdefault((which, act), []).append(speed)

    try:
        for _ in range(rounds + 1):
            for act, test, measured in (("store", "set", ours.store), ("load", "get", ours.load)):
                note("redis-benchmark", act, redis_benchmark(program, environment, port, count, test))
                note("redis-py", act, redis_py(port, count, test))
                note("resp", act, await measured())
    finally:
        await ours.adapter.clear()
        await ours.adapter.close()
    return _results({name: values[1:] for name, values in speeds.items()})


def _results(speeds: dict[tuple[str, str], list[float]]) -> list[Result]:
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    results = [
        Result(f"resp: {act} by {which}", median / 1e9, "GB/s", detail=spread(speeds[which, act], 1e-9))
        for (which, act), median in medians.items()
    ]
    for plain, target in (("redis-benchmark", 0.8), ("redis-py", 2.0)):
        for act in ("store", "load"):
            if (plain, act) in medians:
                ratio = medians["resp", act] / medians[plain, act]
                results.append(at_least(f"resp: {act}, in multiples of {plain}", ratio, "x", target))
    return results
