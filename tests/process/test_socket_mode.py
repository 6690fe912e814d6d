"""Engines that cannot map the server's memory: the same bytes over the socket, whatever dies meanwhile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lmcache
from lmcache.cli.main import main
from lmcache.client import socket_frames
from lmcache.client.transfer_mode import WantedTransfer
from lmcache.core.limits import FRAME_HEADER_BYTES, MAX_PAYLOAD_PART_BYTES
from lmcache.errors import LMCacheError, ServerUnavailable
from lmcache.protocol import messages as m
from lmcache.testing.processes import CacheServer
from polling import until
from process.support import CALL_SECONDS, SmallEngine, checked_server, split, unpack_slots

PAYLOAD = 3 * MAX_PAYLOAD_PART_BYTES // 2  # a frame goes in two parts


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    with checked_server(tmp_path, 0.125) as server:
        yield server


def over_socket(server: CacheServer, **options: Any) -> SmallEngine:
    return SmallEngine(server.port, transfer=WantedTransfer.SOCKET, payload_bytes=PAYLOAD, **options)


def test_both_modes_share_the_same_bytes(server: CacheServer) -> None:
    with over_socket(server) as remote, SmallEngine(server.port, payload_bytes=PAYLOAD) as local:
        mine, theirs = remote.tokens(1, 2, 3), remote.tokens(4, 5)
        assert remote.store(mine) == 3
        assert local.store(theirs) == 2
        for engine, tokens, chunks in ((local, mine, 3), (remote, mine, 3), (remote, theirs, 2)):
            reply = engine.lookup("r", tokens)
            assert reply.chunks == chunks
            assert engine.read(reply)
            engine.end("r")
        modes = {instance["instance_id"]: instance["transfer"][0] for instance in server.status()["instances"]}
        assert modes[local.instance_id]["mode"] == "shm"
        assert modes[remote.instance_id]["mode"] == "socket"
        assert "transfer_mode=socket" in modes[remote.instance_id]["reason"]
    until(lambda: "transfer mode socket: this engine is set to" in server.log())


CANNOT_SEE = """
import sys
from lmcache.errors import LMCacheError
from lmcache.client import Client
from lmcache.client.transfer_mode import WantedTransfer
from process.support import SmallEngine
port, payload_bytes = map(int, sys.argv[1:])
insists = Client(f"tcp://127.0.0.1:{port}", transfer=WantedTransfer.SHM)
for _ in range(20):  # until it has tried: before, nobody has answered yet
    try:
        insists.connect(1.0)
        said = "mapped"
    except LMCacheError as refusal:
        said = f"refused: {refusal}"
    if "memory" in said or said == "mapped":
        break
print(said)
insists.close()
with SmallEngine(port, payload_bytes=payload_bytes) as engine:
    mine, theirs = engine.tokens(1, 2), engine.tokens(7)
    print("stored", engine.store(mine), engine.client.memory)
    for tokens in (mine, theirs):
        reply = engine.lookup("r", tokens)
        print("read", reply.chunks, engine.read(reply))
        engine.end("r")
"""


def test_an_engine_in_another_mount_namespace(server: CacheServer, tmp_path: Path) -> None:
    """As in another container: the same network, another /dev/shm. The mode is found out by itself."""
    unshare = shutil.which("unshare")
    how = [unshare or "unshare", "--mount", *([] if os.getuid() == 0 else ["--user", "--map-root-user"])]
    probe = f"{' '.join(how)} sh -c 'mount -t tmpfs none /dev/shm'"
    if unshare is None or subprocess.run(probe, shell=True, capture_output=True).returncode:
        pytest.skip("this machine does not let tests make a mount namespace")
    with SmallEngine(server.port, payload_bytes=PAYLOAD) as local:
        assert local.store(local.tokens(7)) == 1
        script = tmp_path / "engine.py"
        script.write_text(CANNOT_SEE)
        command = f"mount -t tmpfs none /dev/shm && exec {sys.executable} {script} {server.port} {PAYLOAD}"
        path = f"{Path(lmcache.__file__).parents[1]}:{Path(__file__).parents[1]}"
        done = subprocess.run(
            [*how, "sh", "-c", command],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert done.returncode == 0, done.stderr
        refused, *lines = done.stdout.splitlines()
        assert (
            refused.startswith("refused: cannot open the server's shared memory") and "set the mode to auto" in refused
        )
        assert lines == ["stored 2 None", "read 2 True", "read 1 True"]
        reply = local.lookup("r", local.tokens(1, 2))
        assert reply.chunks == 2 and local.read(reply)
        local.end("r")
    until(lambda: "transfer mode socket: cannot open the server's shared memory" in server.log())


def test_memory_of_another_server_under_the_same_name_is_not_taken(server: CacheServer, tmp_path: Path) -> None:
    """What an engine finds at the path must be this server's: the server epoch decides."""
    with CacheServer(tmp_path, l1_size_gb=0.0625, log_name="other.log") as other:
        other.wait_ready()
        mine, theirs = (Path("/dev/shm") / process.shm_name for process in (server, other))
        aside = mine.with_name(mine.name + "-aside")
        mine.rename(aside)
        try:
            shutil.copyfile(theirs, mine)
            with SmallEngine(server.port, payload_bytes=PAYLOAD) as engine:
                assert engine.client.memory is None
                assert engine.store(engine.tokens(1)) == 1
                reply = engine.lookup("r", engine.tokens(1))
                assert engine.read(reply)
        finally:
            aside.rename(mine)


def test_a_server_that_dies_in_the_middle_of_both_directions(server: CacheServer, tmp_path: Path) -> None:
    with over_socket(server, heartbeat=0.5) as engine:
        tokens = engine.tokens(*range(8))
        assert engine.store(tokens) == 8
        reply = engine.lookup("r", tokens)
        hashes = engine.hashes(engine.tokens(*range(100, 120)))
        reserved = engine.reserve(hashes)
        server.pause()  # so that both are surely under way
        results: dict[str, list[Any]] = {}
        threads = [
            threading.Thread(target=lambda: results.update(fetched=engine.fetch(reply))),
            threading.Thread(target=lambda: results.update(sent=engine.send(hashes, reserved))),
        ]
        for thread in threads:
            thread.start()
        server.kill()
        for thread in threads:
            thread.join(CALL_SECONDS)
            assert not thread.is_alive()
        assert set(results["fetched"]) == {"did not come"} and not any(results["sent"])
        with CacheServer(
            tmp_path, l1_size_gb=0.125, port=server.port, shm_name=server.shm_name, log_name="next.log"
        ) as successor:
            successor.wait_ready()
            until(lambda: engine.client.owner(engine.instance_id, 0) is not None and usable(engine))
            # Numbers of the previous epoch mean nothing to the next, though it may give the same ones out again.
            again = engine.reserve(hashes)
            stale = m.Write(engine.instance_id, 0, b"f" * 16, again.reservation, 0, 0, 0, memoryview(b"late"))
            with pytest.raises(LMCacheError, match="another server epoch"):
                engine.client.call("write", stale, CALL_SECONDS)
            assert all(engine.send(hashes, again))
            assert engine.commit(again.reservation) == 20
            reply = engine.lookup("r", engine.tokens(*range(100, 120)))
            assert reply.chunks == 20 and engine.read(reply)
            engine.end("r")


def usable(engine: SmallEngine) -> bool:
    try:
        engine.client.call("noop", m.Empty(), CALL_SECONDS)
    except ServerUnavailable:
        return False
    return True


STORES_HALF = """
import sys, time
from lmcache.client.transfer_mode import WantedTransfer
from lmcache.protocol import messages as m
from process.support import SmallEngine
engine = SmallEngine(int(sys.argv[1]), transfer=WantedTransfer.SOCKET, heartbeat=0.1, payload_bytes=int(sys.argv[2]))
engine.start()
hashes = engine.hashes(engine.tokens(1, 2))
reply = engine.reserve(hashes)
frame = engine.frame(hashes[:32])
part = m.Write(engine.instance_id, 0, engine.client.server_epoch, reply.reservation, 0, 0, 0, frame[:1 << 20])
print(engine.client.call("write", part, 20.0).received_bytes, flush=True)
time.sleep(1000)
"""


def test_an_engine_that_dies_in_the_middle_of_a_store(server: CacheServer, tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(STORES_HALF)
    path = f"{Path(lmcache.__file__).parents[1]}:{Path(__file__).parents[1]}"
    with subprocess.Popen(
        [sys.executable, script, str(server.port), str(PAYLOAD)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as engine:
        assert engine.stdout is not None and engine.stdout.readline() == b"1048576\n"
        assert server.status()["reservations"] == 1
        engine.kill()
    until(lambda: not server.status()["instances"])
    until(lambda: server.status()["l1"]["used_bytes"] == 0, tell=server.status)
    with over_socket(server) as other:
        assert other.lookup("r", other.tokens(1, 2)).chunks == 0
        assert other.store(other.tokens(1, 2)) == 2
        other.end("r")


def test_parts_that_come_after_their_store_was_given_up_change_nothing(
    server: CacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_frames, "PART_SECONDS", 0.2)
    with over_socket(server) as engine:
        tokens = engine.tokens(1, 2, 3)
        assert engine.store(engine.tokens(9)) == 1
        hit = engine.lookup("r", engine.tokens(9))
        hashes = engine.hashes(tokens)
        first = engine.reserve(hashes)
        server.pause()
        try:
            assert not any(engine.send(hashes, first))  # the parts lie in the server's socket
            assert engine.fetch(hit) == ["did not come"]
            given_up = engine.client.submit(
                "commit", m.Commit(engine.instance_id, 0, first.reservation, b"\0\0\0"), 20.0
            )
        finally:
            server.resume()
        assert given_up.result().committed == 0
        monkeypatch.setattr(socket_frames, "PART_SECONDS", CALL_SECONDS)
        second = engine.reserve(hashes)  # perhaps in the very same slots
        assert second.reservation != first.reservation
        stale = m.Write(
            engine.instance_id, 0, engine.client.server_epoch, first.reservation, 0, 0, 0, memoryview(b"late" * 2000)
        )
        with pytest.raises(LMCacheError, match="has ended"):
            engine.client.call("write", stale, CALL_SECONDS)
        assert all(engine.send(hashes, second))
        assert engine.commit(second.reservation) == 3
        reply = engine.lookup("s", tokens)
        assert reply.chunks == 3 and engine.read(reply)
        assert engine.read(hit)  # the lease outlived the pause
        engine.end("r")
        engine.end("s")


def test_pings_are_answered_while_frames_travel(server: CacheServer) -> None:
    with over_socket(server) as busy, over_socket(server) as other:
        tokens = busy.tokens(*range(40))
        stop = threading.Event()

        def keep_busy() -> None:
            busy.store(tokens)
            while not stop.is_set():
                reply = busy.lookup("r", tokens)
                assert busy.fetch(reply) == [""] * reply.chunks
                busy.end("r")

        thread = threading.Thread(target=keep_busy)
        thread.start()
        try:
            slowest = 0.0
            for _ in range(50):
                started = time.monotonic()
                other.client.call("ping", m.Ping(), CALL_SECONDS)
                slowest = max(slowest, time.monotonic() - started)
        finally:
            stop.set()
            thread.join(30.0)
        assert slowest < 0.5 * CALL_SECONDS


def test_bits_that_flip_in_l1_do_not_reach_the_engine_unnoticed(server: CacheServer) -> None:
    with over_socket(server) as remote, SmallEngine(server.port, payload_bytes=PAYLOAD) as local:
        tokens = remote.tokens(1, 2)
        assert remote.store(tokens) == 2
        reply = remote.lookup("r", tokens)
        assert local.client.memory is not None
        local.client.memory.view(unpack_slots(reply.slots)[1] + FRAME_HEADER_BYTES + 77, 1)[0] ^= 1
        assert remote.fetch(reply) == ["", "payload checksum"]
        remote.client.call("release", m.Release(remote.instance_id, reply.lease, [1]), CALL_SECONDS)
        assert remote.lookup("r", tokens).chunks == 1
        remote.end("r")
        assert len(split(reply.hashes)) == 2


def test_ping_needs_no_memory(server: CacheServer, capsys: pytest.CaptureFixture[str]) -> None:
    shm = Path("/dev/shm") / server.shm_name
    aside = shm.with_name(shm.name + "-aside")
    shm.rename(aside)
    try:
        assert main(["ping", "--rpc-url", f"tcp://127.0.0.1:{server.port}"]) == 0
    finally:
        aside.rename(shm)
    assert "OK" in capsys.readouterr().out
