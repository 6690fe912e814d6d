"""Servers that engines start themselves: shared, ended with the last engine, and gone whatever is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from ctypes.util import find_library
from pathlib import Path

import pytest

from lmcache.integration.engine.run_folder import run_folder
from lmcache.testing.processes import CacheServer
from polling import until
from process.owned_place import OwnedPlace


@pytest.fixture
def place() -> Iterator[OwnedPlace]:
    place = OwnedPlace()
    yield place
    for engine in place.engines:
        engine.kill()
        with engine:  # closes its pipes and waits
            pass
    for pid in place.servers():
        os.kill(pid, signal.SIGKILL)
    for path in place.files():
        path.unlink(missing_ok=True)


def says(engine: subprocess.Popen[str]) -> str:
    assert engine.stdout is not None
    return engine.stdout.readline().strip()


def leave(engine: subprocess.Popen[str]) -> None:
    assert engine.stdin is not None
    engine.stdin.close()
    assert says(engine) == "left"
    assert engine.wait(10) == 0


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_engines_that_come_at_once_share_one_server_and_the_last_one_ends_it(place: OwnedPlace) -> None:
    engines = [place.engine() for _ in range(4)]
    assert [says(engine) for engine in engines] == ["ready"] * 4
    pid = place.server()
    late = place.engine()
    assert says(late) == "ready"
    for engine in engines:
        leave(engine)
    assert place.servers() == [pid]
    leave(late)
    until(place.is_clean)
    again = place.engine()
    assert says(again) == "ready"
    assert place.server() != pid


@pytest.mark.skipif(find_library("gomp") is None or len(os.sched_getaffinity(0)) < 2, reason="needs libgomp, two CPUs")
def test_a_server_runs_on_all_cpus_of_an_engine_whose_threads_are_pinned(
    place: OwnedPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(find_library("gomp")))
    monkeypatch.setenv("GOMP_CPU_AFFINITY", " ".join(map(str, sorted(os.sched_getaffinity(0)))))
    engine = place.engine()
    assert says(engine) == "ready"
    assert len(os.sched_getaffinity(engine.pid)) == 1
    assert os.sched_getaffinity(place.server()) == os.sched_getaffinity(0)
    leave(engine)
    until(place.is_clean)


def test_an_engine_that_comes_while_the_server_ends_gets_another(place: OwnedPlace) -> None:
    first = place.engine()
    assert says(first) == "ready"
    pid = place.server()
    leave(first)
    until(place.is_ending)
    second = place.engine()
    assert says(second) == "ready"
    assert place.server() != pid


@pytest.mark.parametrize("killed", ["engine", "engine and server"])
def test_a_killed_engine_leaves_nothing(place: OwnedPlace, killed: str) -> None:
    engine = place.engine()
    assert says(engine) == "ready"
    if "server" in killed:
        until(place.says_ready)  # the log of a server that dies before stays: it says why
        os.kill(place.server(), signal.SIGKILL)
    engine.kill()
    until(place.is_clean)


def test_a_killed_server_is_started_again_while_an_engine_lives(place: OwnedPlace) -> None:
    engine = place.engine()
    assert says(engine) == "ready"
    pid = place.server()
    until(place.says_ready)  # a server that dies before is one that could not be started
    os.kill(pid, signal.SIGKILL)
    until(lambda: any(other != pid for other in place.servers()) and place.shm.exists())
    leave(engine)
    until(place.is_clean)


def test_with_its_guardian_a_server_ends_in_order(place: OwnedPlace) -> None:
    engine = place.engine()
    assert says(engine) == "ready"
    os.kill(parent(place.server()), signal.SIGKILL)
    until(lambda: not place.servers() and not place.shm.exists())
    second = place.engine()  # what the guardian left, its lock file and its log, hinders nobody
    assert says(second) == "ready"
    leave(engine)
    assert place.servers()
    leave(second)
    until(place.is_clean)


def test_a_server_of_somebody_else_is_used_and_never_ended(place: OwnedPlace, tmp_path: Path) -> None:
    with CacheServer(tmp_path, l1_size_gb=0.0625, port=place.port) as server:
        server.wait_ready()
        engine = place.engine()
        assert says(engine) == "ready"
        assert place.servers() == [server.pid]
        leave(engine)
        assert server.status()
        assert not place.files()
        killed = place.engine()
        assert says(killed) == "ready"
        assert not place.files()  # that nobody would remove
        killed.kill()


def test_a_server_that_is_to_stay_stays_until_it_is_told(place: OwnedPlace) -> None:
    first, second = place.engine(), place.engine(keep=True)
    assert (says(first), says(second)) == ("ready", "ready")
    pid = place.server()
    leave(first)
    leave(second)
    third = place.engine()
    assert says(third) == "ready"
    leave(third)
    assert place.servers() == [pid]
    os.kill(pid, signal.SIGTERM)
    until(place.is_clean)


def test_why_no_server_could_be_started_is_one_sentence(place: OwnedPlace, tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("")
    old, running = (run_folder() / f"{name}-{place.port}-0.log" for name in ("old", "running"))
    for path in (old, running):
        path.touch()
        os.utime(path, (0, 0))
    running.with_suffix(".lock").touch()
    engine = place.engine("--l2-adapter", f'{{"type": "fs_native", "base_path": "{folder}"}}')
    sentence = says(engine)
    assert sentence.startswith("failed ")
    assert str(folder) in sentence
    assert running.exists() and not old.exists()  # logs of long ago go
    for path in (running, running.with_suffix(".lock")):
        path.unlink()
    engine.kill()
    until(lambda: not place.servers() and [path.suffix for path in place.files()] == [".log"])  # which says why


def test_an_engine_that_outlives_its_server_and_is_killed_leaves_nothing(place: OwnedPlace) -> None:
    engine = place.engine()
    assert says(engine) == "ready"
    until(place.says_ready)
    os.kill(place.server(), signal.SIGTERM)
    until(lambda: not place.servers())
    second = place.engine()  # a server that is started meanwhile has a guardian of its own
    assert says(second) == "ready"
    engine.kill()
    second.kill()
    until(place.is_clean)


def test_an_engine_waits_no_longer_than_it_was_told(place: OwnedPlace) -> None:
    with socket.create_server(("127.0.0.1", place.port)):  # takes connections and never says a word
        engine = place.engine(wait_seconds=0.5)
        assert says(engine).startswith("failed It was not ready within 0.5 s; ")
        leave(engine)
    assert not place.servers()


def test_a_port_of_another_program_is_named(place: OwnedPlace) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", place.port))  # does not listen: nobody answers, and nobody else may have it
        engine = place.engine()
        assert f"Cannot listen on 127.0.0.1:{place.port} because it is in use" in says(engine)
        leave(engine)
