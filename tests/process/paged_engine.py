"""An engine without a model: paged KV as vLLM lays it out, our client and worker side, on a CPU or a GPU.

Run as a script it takes JSON lines and answers each with one: {"do": "store", "prompt": 1, "chunks": 4} ...
(`PagedEngine.ORDERS`). What blocks must hold is a function of prompt and chunk, so every byte is checked.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmcache.client.client import Client
from lmcache.client.engine_environment import ENGINE_SYSTEM
from lmcache.client.lookup_client import LookupClient, Progress, RequestSession
from lmcache.device.cuda import Gpu, describe_gpu_group
from lmcache.integration.engine import storer
from lmcache.integration.engine.connector_metadata import ConnectorMetadata, GroupLoad, LoadOrder, StoreOrder
from lmcache.integration.engine.frame_names import WorkerIdentity
from lmcache.integration.engine.worker_side import EndedLoads, WorkerSide
from lmcache.protocol.messages import LookupReply, RegisterInstance
from lmcache.protocol.tokens import pack_tokens

WAIT_SECONDS = 60.0
BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Shape:
    """`hidden`: of the matrices that stand for a decoding step."""

    layers: int
    heads: int
    content: int  # K and V of a head beside each other
    chunks: int  # that the engine has blocks for; a half of them is loaded to
    hidden: int


SHAPES = {"small": Shape(2, 4, 32, 16, 256), "8b": Shape(32, 8, 256, 64, 4096)}


class PagedEngine:
    ORDERS = ("store", "begin_store", "load", "abort", "steps", "idle")

    def __init__(self, port: int, name: str, device: str, shape: Shape) -> None:
        self.shape, self.device = shape, torch.device(device)
        self.client = Client(f"tcp://127.0.0.1:{port}", heartbeat_interval_seconds=0.5)
        self.client.declare(RegisterInstance(name, "paged", 1, 1, 0.5, "test engine"))
        hello = self.client.connect(WAIT_SECONDS)
        self.chunk_tokens = hello.chunk_tokens
        self.per_chunk = hello.chunk_tokens // BLOCK_TOKENS
        blocks = shape.chunks * self.per_chunk
        dimensions = (shape.layers, blocks, shape.heads, BLOCK_TOKENS, shape.content)
        self.kv = torch.zeros(dimensions, dtype=torch.bfloat16, device=self.device)
        group = describe_gpu_group(
            [(f"layer{layer}", self.kv[layer]) for layer in range(shape.layers)],
            engine="test engine",
            block_tokens=BLOCK_TOKENS,
            num_blocks=blocks,
            device_type=self.device.type,
        )
        gpu = Gpu([group], self.device.index or 0) if self.device.type == "cuda" else None
        identity = WorkerIdentity(name, 0, "paged", 1, 0, stores=True)
        make = lambda met: Client(f"tcp://127.0.0.1:{port}", heartbeat_interval_seconds=0.5, on_new_server=met)  # noqa: E731
        self.side = WorkerSide(make, identity, [group], gpu)
        self.side.client.connect(WAIT_SECONDS)
        _until(lambda: self.side.client.owner(name, 0) is not None)
        self.lookups = LookupClient(self.client, name, ENGINE_SYSTEM)
        self._requests = self._jobs = 0

    # ---- what blocks hold --------------------------------------------------------------------------------------------
    def _blocks(self, half: int, chunks: int) -> range:
        first = half * (self.shape.chunks // 2) * self.per_chunk
        return range(first, first + chunks * self.per_chunk)

    def _content(self, prompt: int, chunk: int) -> torch.Tensor:
        """[layer, block, head, token, content] of a chunk."""
        generator = torch.Generator().manual_seed(1000 * prompt + chunk)
        shape = (self.shape.layers, self.per_chunk, *self.kv.shape[2:])
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)

    def _of_chunk(self, blocks: range, index: int) -> torch.Tensor:
        first = blocks.start + index * self.per_chunk
        return self.kv[:, first : first + self.per_chunk]

    # ---- requests ----------------------------------------------------------------------------------------------------
    def _session(self, prompt: int, chunks: int) -> RequestSession:
        self._requests += 1
        tokens = [1000 * prompt + chunk for chunk in range(chunks) for _ in range(self.chunk_tokens)]
        return RequestSession(f"request-{self._requests}", "", b"", pack_tokens(tokens))

    def _looked_up(self, prompt: int, chunks: int) -> tuple[RequestSession, LookupReply]:
        session = self._session(prompt, chunks)
        assert self.lookups.lookup(session)
        assert self.lookups.take_answer(session, WAIT_SECONDS) is Progress.ANSWERED and session.answer is not None
        return session, session.answer

    def _order_store(self, prompt: int, chunks: int, first: int = 0) -> int:
        """Orders the store of the chunks from `first`; the job. The blocks have been written."""
        session, _ = self._looked_up(prompt, chunks)
        self.lookups.give_back(session)
        blocks = array("q", self._blocks(0, chunks)[first * self.per_chunk :])
        self._jobs += 1
        assert session.server is not None
        order = StoreOrder(
            self._jobs, session.server.server_epoch, "", session.hashes[first:].packed, (blocks.tobytes(),)
        )
        self.side.start_stores(ConnectorMetadata(stores=[order]))
        self.lookups.end(session)
        return self._jobs

    def _fill(self, prompt: int, chunks: int) -> None:
        blocks = self._blocks(0, chunks)
        for chunk in range(chunks):
            self._of_chunk(blocks, chunk).copy_(self._content(prompt, chunk))

    def begin_store(self, prompt: int, chunks: int) -> dict[str, int]:
        """Returns while the store runs."""
        self._fill(prompt, chunks)
        return {"job": self._order_store(prompt, chunks)}

    def store(self, prompt: int, chunks: int) -> dict[str, int]:
        job = self.begin_store(prompt, chunks)["job"]
        settled: set[int] = set()
        _until(lambda: settled.update((self.side.report() or _NO_REPORT).settled_stores) or job in settled)
        return {"job": job}

    def _begin_load(self, prompt: int, chunks: int) -> tuple[RequestSession, int]:
        session, answer = self._looked_up(prompt, chunks)
        blocks = array("q", self._blocks(1, answer.chunks))
        assert session.server is not None
        if answer.chunks:
            order = LoadOrder(
                session.request_id,
                session.server.server_epoch,
                "",
                answer.chunks,
                answer.hashes,
                answer.slots,
                (GroupLoad(0, blocks.tobytes()),),
                answer.lease,
            )
            self.side.start_loads(ConnectorMetadata(loads=[order]), idle_step=False)
        return session, answer.chunks

    def _ended(self, request_id: str) -> EndedLoads:
        ended: list[EndedLoads] = []

        def is_over() -> bool:
            ended.append(self.side.ended_loads())
            return request_id in ended[-1].requests

        _until(is_over)
        return ended[-1]

    def load(self, prompt: int, chunks: int) -> dict[str, int]:
        """`exact` chunks of `hit` have the bytes that were stored; `failed` blocks were reported; the rest is wrong."""
        self.kv[:, list(self._blocks(1, chunks))] = 0
        session, hit = self._begin_load(prompt, chunks)
        failed: set[int] = set()
        if hit:
            failed = self._ended(session.request_id).failed_blocks
        blocks = self._blocks(1, hit)
        exact = sum(
            torch.equal(self._of_chunk(blocks, chunk).cpu().view(torch.int16), _bits(self._content(prompt, chunk)))
            for chunk in range(hit)
        )
        self.lookups.end(session)
        return {"hit": hit, "exact": exact, "failed": len(failed)}

    def abort(self, prompt: int, chunks: int) -> dict[str, int]:
        """A load whose request ends at once. Its blocks get a new owner when the load has ended, and keep what that
        writes."""
        session, hit = self._begin_load(prompt, chunks)
        self.lookups.end(session)
        if hit:
            self._ended(session.request_id)
        blocks = list(self._blocks(1, chunks))
        self.kv[:, blocks] = 5
        time.sleep(0.1)
        return {"hit": hit, "overwritten": int((self.kv[:, blocks] != 5).any(dim=0).flatten(1).any(dim=1).sum())}

    # ---- a running stream --------------------------------------------------------------------------------------------
    def steps(self, prompt: int, chunks: int, seconds: float, names: int = 64) -> dict[str, float]:
        """Decoding steps alone, then while what they stand beside is stored, then while it is loaded, with what the
        connector does in each: medians in milliseconds, and how many chunks were moved meanwhile."""
        self._fill(prompt, chunks)
        step = self._decoder()
        self._timed(step, 0.2 * seconds, lambda: 0)
        alone, _ = self._timed(step, seconds, lambda: 0)
        storing, stored = self._timed(step, seconds, self._storing(prompt, chunks, names))
        self.idle()
        self.store(prompt, chunks)
        loading, loaded = self._timed(step, seconds, self._loading(prompt, chunks))
        self.idle()
        return {"alone": alone, "storing": storing, "stored": stored, "loading": loading, "loaded": loaded}

    def _decoder(self) -> Callable[[], None]:
        hidden = self.shape.hidden
        weights = torch.ones(4, hidden, hidden, dtype=torch.bfloat16, device=self.device)
        state = torch.ones(8, hidden, dtype=torch.bfloat16, device=self.device)

        def step() -> None:
            last = state
            for _ in range(self.shape.layers):
                for weight in weights:
                    last = (last @ weight).tanh()
            float(last[0, 0])  # a token is sampled: waits for the stream

        return step

    def _timed(self, step: Callable[[], None], seconds: float, beside: Callable[[], int]) -> tuple[float, int]:
        """`beside` is called in every step and returns how many chunks it has begun to move."""
        times, moved = [], 0
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            began = time.perf_counter()
            moved += beside()
            self.side.start_loads(ConnectorMetadata(), idle_step=False)
            step()
            self.side.ended_loads()
            self.side.report()
            times.append(time.perf_counter() - began)
        return 1000 * statistics.median(times), moved

    def _storing(self, prompt: int, chunks: int, names: int) -> Callable[[], int]:
        """The same blocks again and again, as prompts that are named beforehand. Together they are larger than L1, so
        that a name is gone from there when its turn comes again, and the stores last as long as they are asked for."""
        named = []
        for number in range(names):
            session, _ = self._looked_up(10_000 + 100 * prompt + number, chunks)
            self.lookups.give_back(session)
            assert session.server is not None
            named.append((session.server.server_epoch, session.hashes.packed))
            self.lookups.end(session)
        turns = itertools.cycle(named)
        blocks = array("q", self._blocks(0, chunks)).tobytes()

        def begin() -> int:
            if self.side.storing:
                return 0
            epoch, hashes = next(turns)
            self._jobs += 1
            self.side.start_stores(ConnectorMetadata(stores=[StoreOrder(self._jobs, epoch, "", hashes, (blocks,))]))
            return chunks

        return begin

    def _loading(self, prompt: int, chunks: int) -> Callable[[], int]:
        sessions: list[RequestSession] = []

        def begin() -> int:
            if self.side.loading:
                return 0
            for session in sessions:
                self.lookups.end(session)
            session, hit = self._begin_load(prompt, chunks)
            sessions[:] = [session]
            return hit

        return begin

    def idle(self) -> dict[str, bool]:
        """Once nothing is under way, what is kept of requests has ended too."""
        _until(lambda: self.side.ended_loads() is not None and not (self.side.loading or self.side.storing))
        self.side.report()
        return {"idle": True}

    def close(self) -> None:
        self.side.close()
        self.lookups.close()


class _NoReport:
    settled_stores: tuple[int, ...] = ()


_NO_REPORT = _NoReport()


def _bits(content: torch.Tensor) -> torch.Tensor:
    return content.view(torch.int16)


def _until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "not so in time"
        time.sleep(0.001)


class EngineProcess:
    """The engine as a child process."""

    def __init__(self, port: int, name: str, device: str, shape: str = "small") -> None:
        paths = [str(Path(__file__).parents[1]), *sys.path]
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(port), name, device, shape],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        )
        self._line()

    def ask(self, do: str, **options: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: so does its output
            print(json.dumps({"do": do, **options}), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._line())
        return answer

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine has ended with code {self._process.wait(10.0)}")
        return line

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def release(self) -> None:
        """Ends it, and closes what it was spoken to through."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(WAIT_SECONDS)


@contextlib.contextmanager
def engine_process(port: int, name: str, device: str, shape: str = "small") -> Iterator[EngineProcess]:
    engine = EngineProcess(port, name, device, shape)
    try:
        yield engine
        engine.close()
    finally:
        engine.release()


def main(arguments: Sequence[str]) -> None:
    port, name, device, shape = arguments
    storer.RESERVE_SECONDS = WAIT_SECONDS  # a server that is late on a busy machine loses no store
    engine = PagedEngine(int(port), name, device, SHAPES[shape])
    print("ready", flush=True)
    for line in sys.stdin:
        options = json.loads(line)
        do = options.pop("do")
        assert do in PagedEngine.ORDERS
        print(json.dumps(getattr(engine, do)(**options)), flush=True)
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1:])
