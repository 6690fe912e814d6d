"""A reset of the engine's caches: KV of previous weights is neither found nor stored under the name of the new ones."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lmcache.integration.engine.connector_metadata import WorkerReport
from lmcache.integration.vllm.scheduler_side import STORES_END_SECONDS
from unit.integration.vllm.fakes import answer, output, request, step
from unit.integration.vllm.test_scheduler_side import Engine


def numbered() -> Callable[[int], bytes]:
    numbers = itertools.count(1)
    return lambda count: next(numbers).to_bytes(count, "little")


def engine_of(**options: Any) -> Engine:
    return Engine(random_bytes=numbered(), **options)


def lookups(engine: Engine) -> list[tuple[int, int, bytes]]:
    """(first token, tokens sent, identity) of each."""
    return [(m.first_token, len(m.tokens) // 4, m.identity) for m in engine.client.messages("lookup")]


def name_of(generation: int) -> bytes:
    return msgspec.msgpack.encode(("weights", generation.to_bytes(16, "little")))


def computed(engine: Engine, name: str, tokens: int = 600, **fields: Any) -> Any:
    """A request that misses and is computed in one step; what that step orders."""
    engine.side.on_new_request(asked := request(name, tokens, num_computed_tokens=tokens, **fields))
    engine.settle(answer(0, tokens))
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    blocks = list(range(1, 2 + tokens // 128))
    engine.pool.touch([engine.pool.blocks[block] for block in blocks])
    engine.tables[name] = (blocks,)
    engine.side.after_allocation(asked, (blocks,), 0)
    return asked, engine.side.step_metadata(step(new=[(name, 0, tokens)]))


def free(engine: Engine, name: str) -> None:
    engine.pool.free_blocks([engine.pool.blocks[block] for block in engine.tables[name][0]])


def adapter(folder: Path, **fields: Any) -> Any:
    (folder / "adapter_model.safetensors").write_bytes(b"first")
    return SimpleNamespace(lora_name="style", lora_path=str(folder), lora_int_id=1, **fields)


def test_each_reset_gives_all_later_requests_a_name_that_nobody_else_has(tmp_path: Path) -> None:
    engine = engine_of()
    engine.side.on_new_request(request("before", 600))
    assert engine.side.reset()
    engine.side.on_new_request(request("after", 600))
    engine.side.on_new_request(request("adapter", 600, lora_request=adapter(tmp_path)))
    assert engine.side.reset()
    engine.side.on_new_request(request("again", 600))
    names = [identity for _, _, identity in lookups(engine)]
    assert names[0] == b""
    assert (names[1], names[3]) == (name_of(1), name_of(2))
    assert len(set(names)) == 4


def test_a_hit_of_previous_weights_that_waits_to_be_loaded_is_given_back_and_asked_for_anew() -> None:
    engine = engine_of()
    engine.side.on_new_request(asked := request("a", 600))
    engine.settle(answer(2, 600))
    assert engine.side.matched_tokens(asked, 0) == (512, True)  # but there were no blocks
    assert engine.side.reset()
    assert engine.leases_given_back() == [7]
    assert engine.side.matched_tokens(asked, 0) == (None, False)
    assert lookups(engine) == [(0, 600, b""), (0, 600, name_of(1))]
    engine.settle(answer(0, 600))
    assert engine.side.matched_tokens(asked, 0) == (0, False)


def test_an_answer_that_comes_after_the_reset_is_not_used() -> None:
    engine = engine_of()
    engine.side.on_new_request(asked := request("a", 600))
    assert engine.side.reset()
    engine.settle(answer(2, 600))
    assert engine.side.matched_tokens(asked, 0) == (None, False)
    assert lookups(engine)[-1] == (0, 600, name_of(1))
    engine.side.request_finished(asked, ((),))
    assert [m.request_id for m in engine.client.messages("end_session")] == ["a"]


def test_a_request_that_was_preempted_for_the_reset_is_stored_under_the_new_name_from_its_start() -> None:
    engine = engine_of()
    asked, orders = computed(engine, "a")
    engine.side.step_ended(output(report=WorkerReport(Counter({orders.stores[0].job: 1}))))
    free(engine, "a")
    assert engine.side.reset()
    assert engine.side.matched_tokens(asked, 0) == (None, False)
    assert lookups(engine)[-1] == (0, 600, name_of(1))
    renamed = answer(0, 600)
    renamed.hashes = b"n" * 64
    engine.settle(renamed)
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    engine.side.after_allocation(asked, engine.tables["a"], 0)
    (store,) = engine.side.step_metadata(step(new=[("a", 0, 600)])).stores
    assert store.hashes == b"n" * 64


@pytest.mark.parametrize("decoded", [False, True])
def test_while_blocks_of_before_are_in_use_nothing_is_asked_or_stored(decoded: bool) -> None:
    engine = engine_of(save_decode=decoded)
    asked, orders = computed(engine, "a", 600)
    engine.side.on_new_request(short := request("short", 200, num_computed_tokens=200, all_token_ids=[1] * 300))
    engine.side.matched_tokens(short, 0)
    engine.tables["short"] = ([10, 11, 12],)
    engine.side.after_allocation(short, engine.tables["short"], 0)
    engine.side.step_ended(output(report=WorkerReport(Counter({orders.stores[0].job: 1}))))
    assert not engine.side.reset()
    sent = len(engine.client.sent)
    asked.num_tokens = short.num_tokens = 1200
    asked.all_token_ids = short.all_token_ids = [1] * 1200
    asked.num_computed_tokens = short.num_computed_tokens = 1199
    engine.tables["a"], engine.tables["short"] = (list(range(1, 11)),), (list(range(20, 30)),)
    for _ in range(2):
        orders = engine.side.step_metadata(step(running=[("a", 600, 599), ("short", 200, 999)]))
        assert not orders.stores
        engine.side.step_ended(output())
    engine.side.on_new_request(two := request("b", 600))
    assert engine.side.matched_tokens(two, 0) == (0, False)
    engine.side.request_finished(short, engine.tables["short"])
    engine.side.request_finished(asked, engine.tables["a"])
    assert {method for method, _, _ in engine.client.sent[sent:]} <= {"end_session"}
    assert not engine.side.has_pins
    engine.pool.free_blocks([block for block in engine.pool.blocks if block.ref_cnt])
    assert engine.side.reset()
    assert engine.side.matched_tokens(two, 0) == (None, False)
    assert lookups(engine)[-1] == (0, 600, name_of(2))


class Worker:
    """The worker side in the scheduler's process; a store ends at each look."""

    def __init__(self, engine: Engine, jobs: list[int]) -> None:
        self.engine, self.jobs, self.looks = engine, jobs, 0

    @property
    def storing(self) -> bool:
        return bool(self.jobs)

    def report(self) -> WorkerReport | None:
        return WorkerReport(Counter({self.jobs.pop(0): 1})) if self.jobs and self.looks else None

    def await_store_read(self, seconds: float) -> None:
        self.looks += 1
        self.engine.clock.advance(seconds)


def test_pins_end_without_a_step_where_the_worker_is_in_the_same_process() -> None:
    worker: list[Worker] = []
    engine = engine_of(local_worker=lambda: worker[0] if worker else None)
    asked, orders = computed(engine, "a")
    engine.side.request_finished(asked, engine.tables["a"])
    free(engine, "a")
    engine.side.await_pins()
    assert engine.side.has_pins  # of a worker that is elsewhere nothing is known before it reports
    worker.append(Worker(engine, [orders.stores[0].job]))
    engine.side.await_pins()
    assert not engine.side.has_pins
    assert engine.pool.pinned() == set()


def test_a_store_that_does_not_end_holds_a_reset_up_for_a_bounded_time() -> None:
    engine = engine_of(local_worker=lambda: worker)  # type: ignore[has-type]
    _, orders = computed(engine, "a")
    worker = Worker(engine, [orders.stores[0].job])
    worker.report = lambda: None
    before = engine.clock.now_seconds
    engine.side.await_pins()
    assert engine.side.has_pins
    assert engine.clock.now_seconds - before == pytest.approx(STORES_END_SECONDS, abs=0.2)


def test_what_a_finished_request_left_behind_is_let_go_when_the_engine_resets() -> None:
    engine = engine_of(save_decode=True)
    asked, orders = computed(engine, "a", 600)
    engine.side.step_ended(output(report=WorkerReport(Counter({orders.stores[0].job: 1}))))
    asked.num_tokens, asked.num_computed_tokens, asked.all_token_ids = 800, 799, [1] * 800
    engine.tables["a"] = (list(range(1, 8)),)
    engine.side.request_finished(asked, engine.tables["a"])
    assert engine.side.has_pins
    engine.side.await_pins()
    assert not engine.side.has_pins


@pytest.mark.parametrize("decoded", [False, True])
def test_what_an_adapter_computed_after_its_files_were_changed_is_not_stored(tmp_path: Path, decoded: bool) -> None:
    engine = engine_of(save_decode=decoded)
    lora = adapter(tmp_path, load_inplace=True)
    asked, orders = computed(engine, "a", 600, lora_request=lora)
    assert len(orders.stores) == 1
    (tmp_path / "adapter_model.safetensors").write_bytes(b"other")
    asked.num_tokens, asked.num_computed_tokens, asked.all_token_ids = 1200, 1199, [1] * 1200
    engine.tables["a"] = (list(range(1, 11)),)
    assert not engine.side.step_metadata(step(running=[("a", 600, 599)])).stores
    engine.side.step_ended(output(report=WorkerReport(Counter({orders.stores[0].job: 1}))))
    engine.side.request_finished(asked, engine.tables["a"])
    assert not engine.side.has_pins
    engine.side.on_new_request(request("b", 600, lora_request=lora))
    first, second = engine.client.messages("lookup")
    assert first.identity != second.identity


def test_what_an_adapter_computes_after_another_one_took_its_number_is_not_stored(tmp_path: Path) -> None:
    engine = engine_of()
    (tmp_path / "later").mkdir()
    lora, later = adapter(tmp_path), adapter(tmp_path / "later", load_inplace=True)
    engine.side.on_new_request(asked := request("a", 600, num_computed_tokens=0, lora_request=lora))
    engine.settle(answer(0, 600))
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    engine.tables["a"] = (list(range(1, 6)),)
    engine.side.after_allocation(asked, engine.tables["a"], 0)
    (store,) = engine.side.step_metadata(step(new=[("a", 0, 300)])).stores
    assert len(store.hashes) == 32
    engine.side.on_new_request(request("b", 600, lora_request=later))
    assert not engine.side.step_metadata(step(running=[("a", 300, 300)])).stores


def test_a_request_named_by_what_an_adapter_was_stays_unstored_when_another_names_it_anew(tmp_path: Path) -> None:
    engine = engine_of()
    lora = adapter(tmp_path, load_inplace=True)
    engine.side.on_new_request(asked := request("a", 600, lora_request=lora))
    engine.settle(answer(0, 600))
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    engine.tables["a"] = (list(range(1, 6)),)
    engine.side.after_allocation(asked, engine.tables["a"], 0)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"other")
    engine.side.on_new_request(request("b", 600, lora_request=lora))
    assert not engine.side.step_metadata(step(new=[("a", 0, 600)])).stores
