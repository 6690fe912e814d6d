"""What a coordinator asks of its servers: when it ends, when a token is another one, when somebody leaves and joins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from lmcache.core import limits
from lmcache.environment import SYSTEM
from lmcache.fleet import messages as m
from lmcache.fleet import operations as work
from lmcache.fleet import servers
from lmcache.fleet.fleet import Fleet
from lmcache.fleet.keys import keys_of_prompt
from lmcache.fleet.settings import CoordinatorSettings
from polling import until

WAIT_SECONDS = 60.0


class Coordinator:
    """Its state, and what it asks: `answer` decides what servers say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.token = ""
        self.asked: list[tuple[str, str]] = []
        self.tokens: list[str] = []
        self.most_answer_bytes = 0
        self.answer: Callable[[str, str, Any], Any] = lambda method, path, body: {}
        self.fleet = Fleet(CoordinatorSettings(), lambda: self.token, SYSTEM)
        monkeypatch.setattr(servers, "request", self._request)

    def _request(self, url: str, method: str, path: str, body: Any = None, *, token: str = "", **how: Any) -> Any:
        self.most_answer_bytes = how["most_answer_bytes"]
        self.asked.append((method, path))
        self.tokens.append(token)
        return self.answer(method, path, body)

    def join(self, name: str, token: str = "") -> None:
        self.fleet.instances.register(m.RegisterRequest("127.0.0.1", 1, name), token=token)


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    made = Coordinator(monkeypatch)
    yield made
    made.fleet.stop()


def test_what_is_left_to_tell_is_not_told_once_the_coordinator_ends(coordinator: Coordinator) -> None:
    fleet = coordinator.fleet
    asks, may_answer = threading.Event(), threading.Event()

    def answer(method: str, path: str, body: Any) -> Any:
        asks.set()
        assert may_answer.wait(WAIT_SECONDS)
        return {}

    for number in range(20):
        fleet.quotas.set(f"tenant-{number}", 1 << 30)
    coordinator.join("a")
    coordinator.answer = answer
    fleet.quotas.push()
    assert asks.wait(WAIT_SECONDS)
    fleet.stop()
    may_answer.set()
    until(lambda: not any(thread.name.startswith("fleet-quotas_") for thread in threading.enumerate()))
    assert len(coordinator.asked) == 1


def test_another_token_goes_to_nobody_who_joined_with_the_one_before(coordinator: Coordinator) -> None:
    """Who has the new one joins again, and so shows where it is."""
    fleet = coordinator.fleet
    coordinator.token = "the first token"
    coordinator.join("a", "the first token")
    coordinator.join("b")
    fleet.servers.ask("a", "GET", "/status")
    fleet.servers.ask("b", "GET", "/status")
    coordinator.token = "the second token"
    fleet.servers.ask("a", "GET", "/status")
    assert coordinator.tokens == ["the first token", "", ""]
    assert fleet.instances.heartbeat("b", "the second token") and fleet.instances.heartbeat("a")
    assert not fleet.instances.heartbeat("a", "the second token")
    coordinator.join("a", "the second token")
    assert fleet.instances.heartbeat("a", "the second token")
    fleet.servers.ask("a", "GET", "/status")
    assert coordinator.tokens[3:] == ["the second token"]


def test_a_move_takes_from_the_source_what_the_target_has_in_that_namespace(coordinator: Coordinator) -> None:
    """Two layouts of one model have the same chunk hashes."""
    fleet = coordinator.fleet
    deleted: list[str] = []
    first, second = "aa" * 32, "bb" * 32
    tokens = [1] * fleet.settings.chunk_size
    (chunk_hash,) = [key.chunk_hash_hex for key in keys_of_prompt(fleet.hasher, tokens, "m", 1, "").keys]

    def answer(method: str, path: str, body: Any) -> Any:
        if path == "/cache/lookup":
            chunks = [{"hash": chunk_hash, "tiers": ["l1"], "in_l1": [0]}]
            return {"chunks": chunks, "namespaces": [first, second]}
        if method == "DELETE":
            deleted.extend(body["keys"])
            return {"deleted": 0, "skipped": 1}
        return msgspec.to_builtins(m.JobStatus("r", "prefetch", "done", True, 1, 1, 0, "", 0.1))

    coordinator.answer = answer
    coordinator.join("a")
    coordinator.join("b")
    for seq, namespace in enumerate((first, second), 1):
        entries = [m.Entry(m.Key(chunk_hash, "m", 0))]
        fleet.intake.apply([m.Batch("a", 1, seq, "store", "l1", entries=entries, namespace=namespace)])
    job = fleet.jobs.find(work.begin_move(fleet, m.MoveRequest("a", "b", "m", tokens)).request_id)
    assert job is not None
    until(lambda: job.has_ended)
    assert deleted == [f"{first}/{chunk_hash}"]
    assert (job.done, job.failed) == (1, 1)
    assert job.detail.endswith("1 of them were not deleted at a: pinned, being read, or gone already.")


def test_who_joins_while_it_leaves_is_told_everything(coordinator: Coordinator) -> None:
    fleet = coordinator.fleet
    fleet.quotas.set("tenant", 1 << 30)
    coordinator.join("a")
    fleet.quotas.push()
    until(lambda: fleet.quotas.get("tenant").behind == [])
    with fleet.intake._lock:  # noqa: SLF001 - while a batch is applied
        leaving = threading.Thread(target=fleet.instances.remove, args=("a",))
        leaving.start()
        until(lambda: not fleet.instances.knows("a"))
        joining = threading.Thread(target=coordinator.join, args=("a",))
        joining.start()
        until(lambda: fleet.instances.knows("a"))
        joining.join(0.2)
    leaving.join(WAIT_SECONDS)
    joining.join(WAIT_SECONDS)
    assert fleet.quotas.get("tenant").behind == ["a"]


def test_of_an_endless_answer_only_a_part_is_read(coordinator: Coordinator) -> None:
    coordinator.join("a")
    coordinator.fleet.servers.ask("a", "GET", "/status")
    assert coordinator.most_answer_bytes == limits.MAX_FLEET_ANSWER_BYTES
