"""A server at a path instead of a port: everything that engines and commands do there, and whose the path is."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache.client.client import ClientState
from lmcache.client.transfer_mode import WantedTransfer
from lmcache.testing.processes import CacheServer
from polling import until
from process.commands import lmcache
from process.support import SmallEngine

REQUIRED = ("--l1-size-gb", "0.01", "--eviction-policy", "LRU")
SHM_NAME = f"lmcache-test-{os.getpid()}-ipc"


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "lmcache.sock"
    for memory in Path("/dev/shm").glob(f"{SHM_NAME}*"):
        memory.unlink()


def server_at(path: Path, **options: Any) -> CacheServer:
    settings = {"l1_size_gb": 0.0625, "host": f"ipc://{path}", "shm_name": SHM_NAME}
    return CacheServer(path.parent, **{**settings, **options})


def stores_and_hits(engine: SmallEngine, first: int) -> None:
    tokens = engine.tokens(first, first + 1)
    assert engine.store(tokens) == 2
    reply = engine.lookup("r", tokens)
    assert reply.chunks == 2
    assert engine.read(reply)
    engine.end("r")


def test_engines_and_commands_reach_a_server_at_a_path(path: Path) -> None:
    url = f"ipc://{path}"
    with server_at(path) as server:
        server.wait_ready()
        until(lambda: f"engines at {url}," in server.log())  # said when engines are served already
        for first, transfer in ((1, WantedTransfer.SHM), (11, WantedTransfer.SOCKET)):
            with SmallEngine(url, transfer=transfer) as engine:
                assert (engine.client.memory is None) == (transfer is WantedTransfer.SOCKET)
                stores_and_hits(engine, first)
        assert server.status()["rpc_endpoint"] == url
        assert path.stat().st_mode & 0o022 == 0  # to connect takes the right to write
        pinged = lmcache("ping", "--rpc-url", url)
        assert (pinged.returncode, url in pinged.stdout) == (0, True), pinged.stderr
        assert lmcache("ping", "--url", f"http://127.0.0.1:{server.http_port}").returncode == 0
        measured = lmcache("bench", "server", "--rpc-url", url, "--rounds", "1", "--chunks", "2", "--chunk-mib", "0.5")
        assert measured.returncode == 0, measured.stderr
        assert server.stop() == 0
    assert not path.exists()
    away = lmcache("ping", "--rpc-url", url, "--timeout", "1")
    assert (away.returncode, away.stderr.count("\n"), f"Nothing answers at {url}." in away.stderr) == (1, 1, True)


def test_what_a_killed_server_left_is_replaced_and_engines_come_back(path: Path) -> None:
    with server_at(path) as server:
        server.wait_ready()
        with SmallEngine(f"ipc://{path}", heartbeat=0.5) as engine:
            stores_and_hits(engine, 1)
            previous = engine.client.server_epoch
            server.kill()
            assert path.is_socket()
            until(lambda: engine.client.state is ClientState.UNAVAILABLE)
            with server_at(path, log_name="second.log") as second:
                second.wait_ready()
                until(lambda: engine.client.state is ClientState.READY and engine.client.server_epoch != previous)
                until(lambda: engine.client.owner(engine.instance_id, 0) is not None)
                stores_and_hits(engine, 1)


def test_the_path_of_a_live_server_is_refused(path: Path) -> None:
    with server_at(path) as server:
        server.wait_ready()
        for stopped in (False, True):  # one that stands still is alive, too
            if stopped:
                server.pause()
            with server_at(path, shm_name=f"{SHM_NAME}-other", log_name=f"second-{stopped}.log") as second:
                assert second.popen.wait(30) == 1
                (sentence,) = [line for line in second.log().splitlines() if "Cannot listen" in line]
                assert sentence.endswith(
                    f"Cannot listen on ipc://{path} because a server listens there already; stop it, or choose another "
                    "--host."
                )
                assert "Traceback" not in second.log()
        server.resume()
        checked = lmcache("config", "check", "--host", f"ipc://{path}", *REQUIRED)
        assert checked.returncode == 0, checked.stderr  # of the path itself nothing is wrong
        with SmallEngine(f"ipc://{path}") as engine:
            stores_and_hits(engine, 1)


@pytest.mark.parametrize("obstacle", ["file", "link", "circle", "no folder", "too long", "not from the root"])
def test_a_path_that_cannot_be_had_is_refused_in_one_sentence(path: Path, obstacle: str) -> None:
    host, sentence, code = f"ipc://{path}", "because another file is there; choose another --host.", 1
    if obstacle == "file":
        path.write_text("kept")
    elif obstacle == "link":
        path.symlink_to("nowhere")
    elif obstacle == "circle":
        path.symlink_to(path.name)
    elif obstacle == "no folder":
        host, sentence = f"ipc://{path.parent}/missing/x", "cannot be opened (No such file or directory); create it, or"
    elif obstacle == "too long":
        host, sentence, code = f"ipc:///{'x' * 107}", "the path of a socket has at most 107: choose a shorter one.", 2
    else:
        host, sentence, code = "ipc://x", "from the root on, like ipc:///run/lmcache.sock.", 2
    for command in (("server",), ("config", "check")):
        ended = lmcache(*command, "--host", host, *REQUIRED)
        assert (ended.returncode, sentence in ended.stderr) == (code, True), ended.stderr
        assert "Traceback" not in ended.stderr
    if obstacle == "file":
        assert path.read_text() == "kept"
    assert path.is_symlink() == (obstacle in ("link", "circle"))


def test_a_socket_of_another_program_is_not_taken(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(1)
        with server_at(path) as server:
            assert server.popen.wait(30) == 1
            assert "a server listens there already" in server.log()
        assert path.is_socket()
