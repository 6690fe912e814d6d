"""What operators decided reaches every server, also one that was away, and one that never answers delays no other."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest

from lmcache.environment import Environment
from lmcache.errors import LMCacheError, ServerUnavailable
from lmcache.fleet import messages as m
from lmcache.fleet import servers
from lmcache.fleet.fleet import Fleet
from lmcache.fleet.metadata import FleetPin
from lmcache.fleet.server_sync import ServerSync
from lmcache.fleet.settings import CoordinatorSettings
from lmcache.http.client import HttpRefused
from manual_clock import ManualClock
from polling import until

WAIT_SECONDS = 60.0
NAMES = [f"{'aa' * 32}/{'bb' * 32}", f"{'aa' * 32}/{'cc' * 32}"]
GIB = 1 << 30


class Server:
    """What the operations of a server do that concern pins and quotas."""

    def __init__(self) -> None:
        self.quotas: dict[str, float] = {}
        self.pins: dict[str, str] = {}  # owner by id
        self.refuses: set[str] = set()  # paths
        self.is_silent_to: set[str] = set()  # paths
        self.asked: list[str] = []  # paths
        self.deleted: list[str] = []  # salts
        self.is_away = False
        self.is_to_start_anew = False  # before the next pin; an operator makes another one there at once
        self._numbers = itertools.count(1)

    def answer(self, method: str, path: str, body: Any) -> Any:
        self.asked.append(path)
        if self.is_away or path in self.is_silent_to:
            raise ServerUnavailable("nothing answers")
        if path in self.refuses:
            raise HttpRefused(400, "not this one")
        if path.startswith("/quota/"):
            salt = unquote(path.removeprefix("/quota/"))
            if method == "PUT":
                self.quotas[salt] = body["limit_gb"]
            else:
                self.deleted.append(salt)
                self.quotas.pop(salt, None)
        elif method == "POST":
            starts_anew, self.is_to_start_anew = self.is_to_start_anew, False
            if starts_anew:
                self.pins, self._numbers = {}, itertools.count(1)
            number = self._pin(body["owner"])
            if starts_anew:
                self._pin("an operator")
            return {"pin_id": number, "objects": len(body["keys"])}
        elif method == "GET":
            return {"pins": [{"pin_id": number, "owner": owner} for number, owner in self.pins.items()]}
        else:
            gone = [number for number, owner in self.pins.items() if body in ({"owner": owner}, {"pin_id": number})]
            for number in gone:
                del self.pins[number]
        return {}

    def _pin(self, owner: str) -> str:
        number = str(next(self._numbers))
        self.pins[number] = owner
        return number


class Coordinator:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self.servers: dict[str, Server] = {}
        self.dying: set[str] = set()  # servers that leave while they are asked
        self.may_answer = threading.Event()
        self.is_asked = threading.Event()
        self.fleet = Fleet(CoordinatorSettings(), lambda: "", Environment(clock=self.clock))
        monkeypatch.setattr(servers, "request", self._request)

    def _request(self, url: str, method: str, path: str, body: Any = None, **_: Any) -> Any:
        name = url.removeprefix("http://").partition(":")[0]
        if name == "mute":
            self.is_asked.set()
            assert self.may_answer.wait(WAIT_SECONDS)
        if name in self.dying:
            self.fleet.instances.remove(name)
            raise ServerUnavailable("nothing answers")
        return self.servers[name].answer(method, path, body)

    def join(self, name: str, process: str = "") -> Server:
        server = self.servers.setdefault(name, Server())
        metadata = {"server_epoch": process} if process else {}
        self.fleet.instances.register(m.RegisterRequest(name, 80, name, metadata))
        return server

    def steps(self, condition: Any) -> None:
        """Time goes on, and what is due is done, until that holds."""

        def step() -> bool:
            self.clock.advance(1.0)
            self.fleet.quotas.push()
            self.fleet.pins.push()
            return bool(condition())

        until(step)


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    made = Coordinator(monkeypatch)
    yield made
    made.may_answer.set()
    made.fleet.stop()


def test_a_server_that_never_answers_keeps_no_other_waiting(coordinator: Coordinator) -> None:
    fleet = coordinator.fleet
    fleet.quotas.set("tenant", GIB)
    fleet.metadata.add_pin(
        FleetPin("one", "me", NAMES, "", coordinator.clock.wall() + 3600.0), coordinator.clock.wall()
    )
    coordinator.join("mute")
    fleet.quotas.push()
    fleet.pins.push()
    assert coordinator.is_asked.wait(WAIT_SECONDS)
    server = coordinator.join("a")
    coordinator.steps(lambda: server.quotas and server.pins)
    assert fleet.quotas.get("tenant").behind == ["mute"]


@pytest.mark.parametrize("first", ["what was decided", "what joins"])
def test_a_pin_that_is_made_while_a_server_joins_is_held_once(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Both are about to tell it that pin; the one that is first there does."""
    pins, server = coordinator.fleet.pins, coordinator.join("a")
    answer, run_each = server.answer, servers.Servers.run_each
    held: list[int] = []

    def look(method: str, path: str, body: Any) -> Any:
        found = answer(method, path, body)
        if method == "GET" and not held:  # it has looked at what that server has
            held.append(sum(pins.add({"a": NAMES}, "me", "", 3600.0)[1].held.values()))
        return found

    def after_the_join(asked: servers.Servers, *words: Any) -> Any:
        coordinator.steps(lambda: not pins.behind() and server.pins)
        return run_each(asked, *words)

    if first == "what was decided":
        monkeypatch.setattr(server, "answer", look)
    else:
        monkeypatch.setattr(servers.Servers, "run_each", after_the_join)
        held.append(sum(pins.add({"a": NAMES}, "me", "", 3600.0)[1].held.values()))
    coordinator.steps(lambda: held)
    assert held == [2]
    coordinator.steps(lambda: not pins.behind())
    assert len(server.pins) == 1


@pytest.mark.parametrize("joins", [True, False], ids=["joins again", "stays"])
def test_what_ended_while_a_server_was_away_ends_there_too(coordinator: Coordinator, joins: bool) -> None:
    fleet = coordinator.fleet
    server, other = coordinator.join("a"), coordinator.join("b")
    server.pins["77"] = "an operator"
    server.quotas["of the server alone"] = 5.0
    fleet.quotas.set("gone", GIB)
    fleet.quotas.set("stays", GIB)
    kept, _ = fleet.pins.add({"a": NAMES, "b": NAMES}, "me", "", 3600.0)
    doomed, state = fleet.pins.add({"a": NAMES}, "you", "", 3600.0)
    assert state.held == {"a": 2}
    coordinator.steps(lambda: fleet.quotas.get("stays").behind == [] and not fleet.pins.behind())
    server.is_away = True
    if joins:
        fleet.instances.remove("a")
    fleet.quotas.set("gone", None)
    fleet.quotas.set("stays", 2 * GIB)
    ended = fleet.pins.remove(doomed.pin_id, "")
    assert (ended.pins, ended.objects, ended.behind) == ((1, 2, []) if joins else (1, 4, ["a"]))
    coordinator.steps(lambda: other.quotas == {"stays": 2.0})
    assert f"fleet:{doomed.pin_id}" in server.pins.values() and "gone" in server.quotas
    server.is_away = False
    if joins:
        coordinator.join("a")
    coordinator.steps(
        lambda: (
            server.quotas == {"stays": 2.0, "of the server alone": 5.0}
            and sorted(server.pins.values()) == ["an operator", f"fleet:{kept.pin_id}"]
            and not fleet.pins.behind()
        )
    )
    assert [(pin.pin_id, state.held) for pin, state in fleet.pins.all()] == [(kept.pin_id, {"a": 2, "b": 2})]


def test_a_process_of_a_server_is_told_once_that_a_quota_has_ended(coordinator: Coordinator) -> None:
    fleet = coordinator.fleet
    for salt in ("gone", "other", "stays"):
        fleet.quotas.set(salt, GIB)
    fleet.quotas.set("gone", None)
    server = coordinator.join("a", "first process")

    def told(*deleted: str) -> bool:
        return server.deleted == list(deleted) and not fleet.quotas.behind() and not fleet.quotas.get("gone").behind

    coordinator.steps(lambda: told("gone"))
    server.quotas.clear()
    coordinator.join("a", "first process")
    coordinator.steps(lambda: server.quotas == {"other": 1.0, "stays": 1.0} and told("gone"))
    fleet.instances.remove("a")
    fleet.quotas.set("other", None)
    coordinator.join("a", "first process")
    coordinator.steps(lambda: told("gone", "other"))
    server.refuses.add("/quota/stays")
    fleet.quotas.set("stays", None)
    coordinator.steps(lambda: fleet.quotas.get("stays").behind == ["a"])
    server.refuses.clear()
    coordinator.join("a", "first process")
    coordinator.steps(lambda: told("gone", "other", "stays"))
    server.deleted.clear()
    coordinator.join("a", "second process")  # it may have been started with what the first one kept
    coordinator.steps(lambda: told("gone", "other", "stays"))
    server.deleted.clear()
    coordinator.join("a")  # it does not say which process it is
    coordinator.join("a")
    coordinator.steps(lambda: told("gone", "other", "stays"))


def test_what_ended_is_remembered_by_a_coordinator_that_starts_again(tmp_path: Any) -> None:
    def start() -> Fleet:
        return Fleet(CoordinatorSettings(metadata_path=str(tmp_path / "decisions")), lambda: "", Environment())

    fleet = start()
    fleet.quotas.set("gone", GIB)
    fleet.quotas.set("back", GIB)
    for salt in ("gone", "back"):
        fleet.quotas.set(salt, None)
    fleet.quotas.set("back", GIB)
    fleet.stop()
    again = start()
    assert again.metadata.ended_quotas() == ["gone"] and again.metadata.quotas() == {"back": GIB}
    again.stop()


def test_a_refusal_keeps_nothing_else_from_a_server(coordinator: Coordinator) -> None:
    fleet = coordinator.fleet
    for salt in ("first", "refused", "last"):
        fleet.quotas.set(salt, GIB)
    server = coordinator.join("a")
    server.refuses.add("/quota/refused")
    coordinator.steps(lambda: set(server.quotas) == {"first", "last"})
    coordinator.steps(lambda: fleet.quotas.get("last").behind == [])
    assert fleet.quotas.get("refused").behind == ["a"]
    server.refuses.clear()
    coordinator.steps(lambda: "refused" in server.quotas and not fleet.quotas.get("refused").behind)


def test_a_change_of_what_was_refused_hides_no_change_before_it(coordinator: Coordinator) -> None:
    fleet = coordinator.fleet
    server = coordinator.join("a")
    server.refuses.add("/quota/refused")
    for salt in ("refused", "first"):
        fleet.quotas.set(salt, GIB)
    coordinator.steps(lambda: "first" in server.quotas)
    for salt in ("other", "refused"):
        fleet.quotas.set(salt, 2 * GIB)
    server.refuses.clear()
    server.is_silent_to.add("/quota/other")
    coordinator.steps(lambda: "/quota/other" in server.asked)
    server.is_silent_to.clear()
    coordinator.steps(lambda: not fleet.quotas.get("other").behind and not fleet.quotas.get("refused").behind)
    assert server.quotas == {"first": 1.0, "other": 2.0, "refused": 2.0}


def test_nothing_is_remembered_of_pins_that_have_ended(coordinator: Coordinator) -> None:
    fleet = coordinator.fleet
    coordinator.join("a")
    for number in range(50):
        fleet.pins.add({"a": NAMES}, f"owner {number}", "", 10.0)
    states = fleet.pins._states  # noqa: SLF001
    assert len(states) == 50
    coordinator.clock.advance(20.0)
    fleet.pins.push()
    assert not states


def test_a_pin_that_is_made_while_others_are_looked_at_is_known_afterwards(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = coordinator.fleet
    server = coordinator.join("a")
    coordinator.steps(lambda: not fleet.pins.behind())
    made: list[FleetPin] = []
    adding = threading.Thread(target=lambda: made.append(fleet.pins.add({"a": NAMES}, "me", "", 3600.0)[0]))
    all_pins = fleet.metadata.pins

    def slow(at: float) -> list[FleetPin]:
        found = all_pins(at)
        adding.start()
        adding.join(0.5)  # it may have to wait for whoever looks
        return found

    with monkeypatch.context() as patch:
        patch.setattr(fleet.metadata, "pins", slow)
        fleet.pins.push()
    adding.join()
    ended = fleet.pins.remove(made[0].pin_id, "")
    assert (ended.pins, ended.objects, ended.behind) == (1, len(NAMES), [])
    assert not server.pins


def test_pins_of_a_server_that_starts_anew_while_it_is_told_are_not_ended_by_old_numbers(
    coordinator: Coordinator,
) -> None:
    fleet = coordinator.fleet
    server = coordinator.join("a")
    coordinator.steps(lambda: not fleet.pins.behind())
    owners = [f"fleet:{fleet.pins.add({'a': NAMES}, 'me', '', 3600.0)[0].pin_id}" for _ in range(2)]
    server.is_to_start_anew = True
    coordinator.join("a")
    coordinator.steps(lambda: not fleet.pins.behind())
    assert sorted(server.pins.values()) == sorted(["an operator", *owners])


def test_nothing_is_remembered_of_a_server_that_has_left_while_it_was_asked(coordinator: Coordinator) -> None:
    fleet = coordinator.fleet
    coordinator.join("a")
    coordinator.steps(lambda: not fleet.pins.behind())
    pin, _ = fleet.pins.add({"a": NAMES}, "me", "", 3600.0)
    coordinator.dying.add("a")
    assert fleet.pins.remove(pin.pin_id, "").behind == ["a"]
    coordinator.steps(lambda: not fleet.pins.behind())


def test_a_thread_that_cannot_be_started_has_nobody_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    may_end = threading.Event()

    def tell(instance_id: str) -> None:
        told.append(instance_id)
        assert may_end.wait(WAIT_SECONDS)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    sync = ServerSync("decisions", tell, ManualClock())
    sync.note(["a"])
    sync.step()
    until(lambda: told)
    sync.note(["b", "c"])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        sync.step()
    for _ in range(3):
        sync.step()
    may_end.set()
    until(lambda: not sync.behind())
    sync.close()
    assert sorted(told) == ["a", "b", "c"]


def test_each_server_is_told_by_one_at_a_time_and_again_after_a_failure() -> None:
    clock = ManualClock()
    running: list[str] = []
    told: list[str] = []
    faults = [LMCacheError("away"), RuntimeError("a defect")]
    may_end = threading.Event()

    def tell(instance_id: str) -> None:
        assert instance_id not in running
        running.append(instance_id)
        told.append(instance_id)
        assert may_end.wait(WAIT_SECONDS)
        running.remove(instance_id)
        if faults:
            raise faults.pop()

    sync = ServerSync("decisions", tell, clock)
    sync.note(["a"])
    sync.step()
    until(lambda: running)
    sync.note(["a"])
    sync.step()
    assert told == ["a"]
    sync.forget("a")
    sync.note(["a"])  # it has joined again
    sync.step()
    assert told == ["a"]
    may_end.set()

    def step() -> bool:
        clock.advance(1.0)
        sync.step()
        return not sync.behind()

    until(step)
    assert told == ["a"] * 3
    until(lambda: not running)
    sync.note(["a", "b"])
    sync.forget("b")
    assert sync.behind() == {"a"}
    sync.close()
    sync.step()
    assert told == ["a"] * 3
