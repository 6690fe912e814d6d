"""A server that answers when the test says so, and the few objects of vLLM that the connector touches."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from lmcache.errors import ServerUnavailable
from lmcache.protocol.messages import HelloReply, LookupReply
from manual_clock import ManualClock


def hello(server_epoch: bytes = b"epoch-one-epoch-", chunk_tokens: int = 256) -> HelloReply:
    return HelloReply(1, "0", server_epoch, chunk_tokens, "blake3", ["shm"], "/dev/shm/x", 1 << 20, 300.0, 600.0)


class FakePending:
    def __init__(self, clock: ManualClock, deadline: float) -> None:
        self._clock = clock
        self._deadline = deadline
        self.outcome: Any = None

    def done(self) -> bool:
        if self.outcome is None and self._clock.now_seconds >= self._deadline:
            self.outcome = ServerUnavailable("no answer in time")
        return self.outcome is not None

    def wait(self, seconds: float) -> bool:
        if not self.done():
            self._clock.advance(seconds)
        return self.done()

    def cancel(self) -> None:
        return

    def result(self) -> Any:
        assert self.done()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class FakeClient:
    """Keeps every call; `answers` maps a method to what it is answered with at once."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.hello: HelloReply | None = hello()
        self.sent: list[tuple[str, Any, FakePending]] = []
        self.answers: dict[str, Callable[[Any], Any]] = {}

    @property
    def server_epoch(self) -> bytes:
        return self.hello.server_epoch if self.hello is not None else b""

    def submit(self, method: str, message: Any, timeout_seconds: float) -> FakePending:
        if self.hello is None:
            raise ServerUnavailable("away")
        pending = FakePending(self.clock, self.clock.now_seconds + timeout_seconds)
        if method in self.answers:
            pending.outcome = self.answers[method](message)
        self.sent.append((method, message, pending))
        return pending

    def call(self, method: str, message: Any, timeout_seconds: float) -> Any:
        return self.submit(method, message, timeout_seconds).result()

    def messages(self, method: str) -> list[Any]:
        return [message for name, message, _ in self.sent if name == method]

    def pendings(self, method: str) -> list[FakePending]:
        return [pending for name, _, pending in self.sent if name == method]

    def start(self) -> None:
        return

    def close(self) -> None:
        self.hello = None


def answer(
    chunks_hit: int, prompt_tokens: int, *, lease: int = 7, ranks: int = 1, groups: int = 1, chunk: int = 256
) -> Any:
    full = prompt_tokens // chunk
    return LookupReply(
        chunks_hit,
        chunks_hit,
        lease if chunks_hit else 0,
        b"".join(bytes([i]) * 32 for i in range(full)),
        array("Q", range(ranks * groups * chunks_hit)).tobytes(),
    )


class FakeBlockPool:
    """vLLM's pool as far as references go."""

    def __init__(self, blocks: int) -> None:
        self.blocks = [SimpleNamespace(block_id=i, ref_cnt=0) for i in range(blocks)]
        self.null_block = self.blocks[0]
        self.num_gpu_blocks = blocks

    def get_num_free_blocks(self) -> int:
        return len(self.blocks) - 1 - len(self.pinned())

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0

    def pinned(self) -> set[int]:
        return {block.block_id for block in self.blocks if block.ref_cnt}


def request(request_id: str, prompt_tokens: int, **fields: Any) -> Any:
    values = {
        "request_id": request_id,
        "prompt_token_ids": list(range(prompt_tokens)),
        "prompt_embeds": None,
        "cache_salt": None,
        "num_tokens": prompt_tokens,
        "lora_request": None,
        "mm_features": [],
        "resumable": False,
        "kv_transfer_params": None,
        "skip_reading_prefix_cache": False,
        "num_prompt_tokens": prompt_tokens,
        "arrival_time": 0.0,
    }
    return SimpleNamespace(**{**values, **fields})


def step(
    new: Sequence[tuple[str, int, int]] = (),
    running: Sequence[tuple[str, int, int]] = (),
    states: dict[str, list[tuple[int, int, int]]] | None = None,
) -> Any:
    """Each: (request id, tokens computed before the step, tokens scheduled in it). `states` that this step
    completes, by request: (group, block, tokens)."""
    return SimpleNamespace(
        kv_connector_block_state=SimpleNamespace(boundary_state_offloads=states or {}),
        total_num_scheduled_tokens=sum(count for _, _, count in [*new, *running]),
        num_scheduled_tokens={name: count for name, _, count in [*new, *running]},
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=before) for name, before, _ in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _, _ in running], num_computed_tokens=[before for _, before, _ in running]
        ),
    )


def output(
    *, report: Any = None, received: Any = frozenset(), failed: Any = frozenset(), invalid: Any = frozenset()
) -> Any:
    return SimpleNamespace(
        kv_connector_worker_meta=report,
        finished_recving=set(received),
        failed_recving=set(failed),
        invalid_block_ids=set(invalid),
    )
