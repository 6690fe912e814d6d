"""What a coordinator asks of its servers: when it ends, when a token is another one, when somebody leaves and joins."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from lmcache.core import limits
from lmcache.environment import SYSTEM
from lmcache.errors import ConfigError, LMCacheError, ServerUnavailable
from lmcache.fleet import messages as m
from lmcache.fleet import operations as work
from lmcache.fleet import servers
from lmcache.fleet.controller import Controller
from lmcache.fleet.fleet import Fleet
from lmcache.fleet.jobs import FleetJob
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

    def join(self, name: str, token: str = "", port: int = 0) -> None:
        port = port or 1 + len(self.fleet.instances)
        self.fleet.instances.register(m.RegisterRequest("127.0.0.1", port, name), token=token)


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


def test_a_server_with_two_names_keeps_what_is_moved_from_one_to_the_other(coordinator: Coordinator) -> None:
    """As its old name is known for a while."""
    fleet = coordinator.fleet
    tokens = [1] * fleet.settings.chunk_size
    (key,) = keys_of_prompt(fleet.hasher, tokens, "m", 1, "").keys
    for name in ("old", "new"):
        coordinator.join(name, port=8080)
    fleet.intake.apply([m.Batch("old", 1, 1, "store", "l1", entries=[m.Entry(key)], namespace="aa" * 32)])
    with pytest.raises(ConfigError, match=r'"source" and "target" must be two servers, and both are at http://127'):
        work.begin_move(fleet, m.MoveRequest("old", "new", "m", tokens))
    assert coordinator.asked == [] and fleet.jobs.all() == []


def test_a_server_begins_no_job_that_the_coordinator_does_not_take(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.answer = lambda method, path, body: {"l2": {"adapters": [{"name": "disk"}]}, "request_id": "r"}
    coordinator.join("a")
    controller, tokens = Controller(coordinator.fleet), [1] * coordinator.fleet.settings.chunk_size
    monkeypatch.setattr(limits, "MAX_FLEET_JOBS_WAITING", 0)
    with pytest.raises(LMCacheError, match="0 jobs wait already"):
        prompt = controller.prompt(tokens, "m", "")
        controller.move(("a", "LocalCPUBackend"), ("a", "LocalDiskBackend"), prompt, tokens, copy=False)
    assert coordinator.asked == [("GET", "/status")]


def test_requests_side_by_side_do_not_pass_the_limit_of_jobs(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = coordinator.fleet.jobs

    def last(job: FleetJob) -> None:
        job.stop.wait(WAIT_SECONDS)

    def submit() -> None:
        with contextlib.suppress(LMCacheError):
            jobs.submit("move", last)

    def waiting() -> int:
        return sum(job.status == "waiting" for job in jobs.all())

    for _ in range(9):  # one more than there are threads
        submit()
    until(lambda: waiting() == 1)
    counted, another = jobs.all, threading.Thread(target=submit)

    def count_while_another_comes() -> list[FleetJob]:
        found = counted()
        if another.ident is None:
            another.start()
            another.join(0.2)
        return found

    monkeypatch.setattr(limits, "MAX_FLEET_JOBS_WAITING", 2)
    monkeypatch.setattr(jobs, "all", count_while_another_comes)
    submit()
    another.join()
    assert waiting() == 2


def test_a_job_that_ends_with_the_coordinator_says_so(coordinator: Coordinator) -> None:
    fleet = coordinator.fleet
    status = msgspec.to_builtins(m.JobStatus("r", "prefetch", "running", False, 1, 0, 0, "", 0.1))
    asked = threading.Event()

    def answer(method: str, path: str, body: Any) -> Any:
        asked.set()
        return status

    coordinator.answer = answer
    coordinator.join("a")

    def follow(running: FleetJob) -> None:
        work.await_server_job(fleet, "a", "r", running)

    job = fleet.jobs.submit("move", follow)
    assert asked.wait(WAIT_SECONDS)
    fleet.jobs.close()
    until(lambda: job.has_ended)
    assert (job.status, job.detail) == ("failed", "The coordinator ended before a had ended its part of this.")


@pytest.mark.parametrize(
    "wrong", [{"done": "false"}, {"objects_done": "many"}, {"status": ["done"]}, {"detail": {}}, {"age_seconds": None}]
)
def test_a_job_of_a_server_that_is_told_wrongly_has_not_ended(coordinator: Coordinator, wrong: dict[str, Any]) -> None:
    status = msgspec.to_builtins(m.JobStatus("r", "prefetch", "running", False, 1, 0, 0, "", 0.1))
    coordinator.answer = lambda method, path, body: {**status, **wrong}
    coordinator.join("a")
    with pytest.raises(ServerUnavailable, match="a does not answer as a cache server does"):
        work.server_job(coordinator.fleet, "a", "r")
    coordinator.answer = lambda method, path, body: {**status, "detail": "no " * (1 << 20)}
    job = work.server_job(coordinator.fleet, "a", "r")
    assert job is not None and len(job.detail) == limits.MAX_REASON_CHARACTERS


def test_what_a_server_holds_of_a_pin_is_what_it_said_last(coordinator: Coordinator) -> None:
    fleet = coordinator.fleet
    objects = 1
    coordinator.answer = lambda method, path, body: {"pins": [], "objects": objects, "pin_id": "p"}
    coordinator.join("a")
    fleet.pins.push()
    until(lambda: not fleet.pins.behind())
    _, state = fleet.pins.add({"a": [f"{'aa' * 32}/{'bb' * 32}"]}, "me", "", 1000.0)
    assert state.held == {"a": 1}
    objects = 0
    coordinator.join("a")  # started anew, with nothing
    fleet.pins.push()
    until(lambda: not fleet.pins.behind())
    assert [state.held for _, state in fleet.pins.all()] == [{}]


def test_a_list_of_quotas_does_not_go_through_all_servers_for_every_salt(coordinator: Coordinator) -> None:
    fleet = coordinator.fleet
    salts = [m.Entry(m.Key(f"{number:064x}", "m", 0, 0, f"tenant-{number}")) for number in range(4000)]

    def list_seconds() -> float:
        taken = []
        for _ in range(3):
            began = time.process_time()
            assert len(fleet.quotas.all()) == len(salts)
            taken.append(time.process_time() - began)
        return min(taken)

    coordinator.join("a")
    fleet.intake.apply([m.Batch("a", 1, 1, "store", "l1", entries=salts)])
    of_one_server = list_seconds()
    for number in range(1000):
        coordinator.join(f"server-{number}")
    assert list_seconds() < 4 * of_one_server


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
