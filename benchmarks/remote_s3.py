"""`s3` beside a plain awscrt program: the same objects, parallelism and settings, one after the other.

The plain program sends each object from memory and copies what it gets into memory, as its documentation shows.
"""

from __future__ import annotations

import asyncio
import io
import os
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmcache.clock import SystemClock
from lmcache.core.frame import frame_bytes
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.limits import L2_LOAD_BATCH_BYTES, L2_STORE_BATCH_BYTES
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.frames import FrameMemory
from lmcache.testing.processes import LOOPBACK
from measure import Result, at_least, spread

TESTS = Path(__file__).resolve().parents[1] / "tests"
BUCKET = "bench"
TARGET = 0.95
COUNT = 24  # objects at once: as many as the storage loop loads of this size
PAYLOAD_BYTES = 4 << 20
SMALL_PAYLOAD_BYTES = 64 << 10
READS = 6  # of what a round wrote
NAMESPACE = Namespace("bench", 1, 0, 0, "0" * 32)


class PlainProgram:
    def __init__(self, host: str, access_key: str, secret_key: str, region: str) -> None:
        from awscrt import auth, s3
        from awscrt import io as crt

        threads = crt.EventLoopGroup(64)
        credentials = auth.AwsCredentialsProvider.new_static(access_key, secret_key)
        self._host = host
        self._client = s3.S3Client(
            bootstrap=crt.ClientBootstrap(threads, crt.DefaultHostResolver(threads)),
            region=region,
            tls_mode=s3.S3RequestTlsMode.DISABLED,
            signing_config=s3.create_default_s3_signing_config(region=region, credential_provider=credentials),
            part_size=8 << 20,
            throughput_target_gbps=25.6,  # 64 connections
        )

    def run(self, which: str, number: int, frames: Sequence[memoryview]) -> float:
        ended = threading.Semaphore(0)
        faults: list[Any] = []

        def on_done(error: Any = None, **_: Any) -> None:
            if error is not None:
                faults.append(error)
            ended.release()

        started = time.perf_counter()
        requests = [
            self._request(which, f"/{BUCKET}/plain/{number}/{i}", frames[i], on_done) for i in range(len(frames))
        ]
        for _request in requests:
            ended.acquire()
        assert not faults, faults[0]
        return time.perf_counter() - started

    def _request(self, which: str, path: str, frame: memoryview, on_done: Any) -> Any:
        from awscrt.http import HttpHeaders, HttpRequest
        from awscrt.s3 import S3RequestType

        if which == "put":
            headers = HttpHeaders([("Host", self._host), ("Content-Length", str(frame.nbytes))])
            request = HttpRequest("PUT", path, headers, io.BytesIO(frame))
            return self._client.make_request(type=S3RequestType.PUT_OBJECT, request=request, on_done=on_done)

        def on_body(chunk: bytes, offset: int, **_: Any) -> None:
            frame[offset : offset + len(chunk)] = chunk

        request = HttpRequest("GET", path, HttpHeaders([("Host", self._host)]))
        return self._client.make_request(
            type=S3RequestType.GET_OBJECT, request=request, on_body=on_body, on_done=on_done
        )


class S3Bench:
    def __init__(self, specification: dict[str, Any], plain: PlainProgram, payload_bytes: int) -> None:
        self._plain = plain
        self._runner = Runner(build(parse_adapter(specification, 0)), Metrics().l2, SystemClock())
        self._memory = FrameMemory(COUNT, payload_bytes)
        self._size_bytes = frame_bytes(payload_bytes)
        self._times: dict[str, list[float]] = {name: [] for name in ("put", "store", "get", "load")}

    async def run(self, rounds: int) -> list[Result]:
        await self._runner.open()
        for number in range(rounds + 1):
            await self._round(number)
        await self._runner.drain(10)
        await self._runner.close(10)
        return [self._result("store", "put"), self._result("load", "get")]

    async def _round(self, number: int) -> None:
        """The first one warms up. Who goes first changes from turn to turn."""
        keys = [ObjectKey(NAMESPACE, os.urandom(32)) for _ in range(COUNT)]
        payload = os.urandom(self._memory.payload_bytes)
        for slot, key in enumerate(keys):
            self._memory.fill(slot, key, payload)
        for turn, (plain, ours) in enumerate((("put", "store"), *[("get", "load")] * READS), number):
            for program in (plain, ours) if turn % 2 else (ours, plain):
                if program == plain:
                    seconds = await asyncio.to_thread(self._plain.run, plain, number, self._memory.buffers)
                else:
                    seconds = await self._ours(ours, keys)
                if number:
                    self._times[program].append(seconds)
        await self._runner.layers.deletion.delete(keys)

    async def _ours(self, which: str, keys: Sequence[ObjectKey]) -> float:
        """In the batches of the storage loop."""
        batch_bytes = L2_STORE_BATCH_BYTES if which == "store" else L2_LOAD_BATCH_BYTES
        step = max(1, batch_bytes // self._size_bytes)
        operation: Any = self._runner.store if which == "store" else self._runner.load
        buffers = self._memory.buffers
        started = time.perf_counter()
        outcomes = await asyncio.gather(
            *(operation(keys[at : at + step], buffers[at : at + step], lambda: None) for at in range(0, COUNT, step))
        )
        seconds = time.perf_counter() - started
        good = StoreOutcome.STORED if which == "store" else LoadOutcome.LOADED
        assert all(outcome is good for batch in outcomes for outcome in batch), outcomes
        return seconds

    def _result(self, ours: str, plain: str) -> Result:
        total_mb = COUNT * self._size_bytes / 1e6
        # Of each round: a service that shares the processors changes its speed from one second to the next.
        pairs = zip(self._times[plain], self._times[ours], strict=True)
        ratio = statistics.median(theirs / own for theirs, own in pairs)
        floor, own = statistics.median(self._times[plain]), statistics.median(self._times[ours])
        name = f"s3 {ours}, {COUNT} x {self._size_bytes >> 10} KiB at once, of plain {plain}"
        detail = f"{total_mb / own:.0f} of {total_mb / floor:.0f} MB/s, ms {spread(self._times[ours], 1e3)}"
        return at_least(name, ratio, "ratio", TARGET, detail)


async def s3(folder: Path, rounds: int, small: bool) -> list[Result]:
    sys.path.append(str(TESTS))  # the service is that of the tests
    from services.seaweedfs import ACCESS_KEY, REGION, SECRET_KEY, SeaweedFS

    with SeaweedFS(folder / "server") as service:
        service.wait_ready()
        service.make_bucket(BUCKET)
        host = f"{LOOPBACK}:{service.port}"
        specification = {
            "type": "s3",
            "s3_endpoint": f"{host}/{BUCKET}",
            "s3_region": REGION,
            "disable_tls": True,
            "aws_access_key_id": ACCESS_KEY,
            "aws_secret_access_key": SECRET_KEY,
        }
        plain = PlainProgram(host, ACCESS_KEY, SECRET_KEY, REGION)
        bench = S3Bench(specification, plain, SMALL_PAYLOAD_BYTES if small else PAYLOAD_BYTES)
        return await bench.run(rounds)
