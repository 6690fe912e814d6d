"""CURVE on a real server with real pyzmq clients: who has no key gets nothing, and a key reaches its salts alone."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from lmcache.cli.main import main
from lmcache.client import Client
from lmcache.client.transfer_mode import WantedTransfer
from lmcache.errors import LMCacheError, RemoteError, ServerUnavailable
from lmcache.integration.vllm.settings import ConnectorSettings
from lmcache.protocol import messages as m
from lmcache.testing.processes import CacheServer
from lmcache.transport.curve_keys import CurveFiles
from polling import until
from process.memory_watch import private_bytes
from process.support import CALL_SECONDS, LAYOUT, SmallEngine
from seeds import SEED
from unit.transport.curve_client import GREETING, CurveClientEnd, keypair

QUESTIONS = 300
# How often the refusal about what is stored takes longer, of pairs: by chance alone 0.5 with a standard deviation of
# 0.03, whatever else this machine does.
NO_DIFFERENCE = (0.3, 0.7)
CLIENTS = {"a": "salt-a\n", "b": "salt-b\n", "all": None}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "clients").mkdir(mode=0o700)
    for name in ("server", "stranger", *CLIENTS):
        assert main(["keygen", name, "--folder", str(folder), "-q"]) == 0
    for name, salts in CLIENTS.items():
        allow(folder, name, salts)
    return folder


def allow(folder: Path, name: str, salts: str | None) -> None:
    if salts is not None:
        (folder / "clients" / f"{name}.salts").write_text(salts)
    (folder / "clients" / f"{name}.pub").write_text((folder / f"{name}.pub").read_text())


@pytest.fixture(scope="module")
def server(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheServer]:
    extra = ["--zmq-curve-server-key-file", str(keys / "server.key")]
    extra += ["--zmq-curve-client-keys-dir", str(keys / "clients"), "--audit-log", str(keys / "audit.jsonl")]
    with CacheServer(tmp_path_factory.mktemp("curve"), l1_size_gb=0.0625, extra=extra) as server:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.log()
        assert server.stop() == 0


def files(keys: Path, name: str) -> CurveFiles:
    return CurveFiles(str(keys / "server.pub"), str(keys / f"{name}.key"))


@contextlib.contextmanager
def engine(server: CacheServer, keys: Path, name: str, **options: Any) -> Iterator[SmallEngine]:
    engine = SmallEngine(server.port, curve=files(keys, name), **options)
    try:
        yield engine.start()
    finally:
        engine.close()


def test_an_engine_with_a_key_stores_and_hits_in_shared_memory_and_over_the_socket(
    server: CacheServer, keys: Path
) -> None:
    large = 3 << 20
    with engine(server, keys, "all", payload_bytes=large) as local:
        assert local.client.memory is not None
        assert local.store(local.tokens(1, 2)) == 2
        with engine(server, keys, "all", payload_bytes=large, transfer=WantedTransfer.SOCKET) as remote:
            reply = remote.lookup("r", remote.tokens(1, 2))
            assert reply.chunks == 2
            assert remote.read(reply)
            assert remote.store(remote.tokens(3)) == 1
            reply = local.lookup("r", local.tokens(3))
            assert reply.chunks == 1
            assert local.read(reply)


@pytest.mark.parametrize("transport", ["plain", "stranger", "wrong server"])
def test_a_client_without_a_key_that_is_let_in_gets_no_answer(server: CacheServer, keys: Path, transport: str) -> None:
    curve = {
        "plain": None,
        "stranger": files(keys, "stranger"),
        "wrong server": CurveFiles(str(keys / "stranger.pub"), str(keys / "all.key")),
    }[transport]
    reason = {"plain": "speaks CURVE", "stranger": "does not let", "wrong server": "not the one that is expected"}
    client = Client(f"tcp://127.0.0.1:{server.port}", curve=curve)

    def said() -> str:
        with pytest.raises(ServerUnavailable) as refused:
            client.connect(0.5)
        return str(refused.value)

    try:
        until(lambda: reason[transport] in said(), tell=said)  # until it has tried, that nobody has answered yet
    finally:
        client.close()


def test_libzmqs_heartbeats_are_answered(server: CacheServer, keys: Path) -> None:
    """Where no machine stands still for as long as libzmq waits for an answer: a server that gave none would lose every
    connection."""
    until(lambda: keeps_its_connection(server, keys))


def keeps_its_connection(server: CacheServer, keys: Path) -> bool:
    """For many heartbeats."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.curve_serverkey = (keys / "server.pub").read_text().strip().encode()
        dealer.curve_secretkey = (keys / "all.key").read_text().strip().encode()
        dealer.curve_publickey = (keys / "all.pub").read_text().strip().encode()
        for option, milliseconds in ((zmq.HEARTBEAT_IVL, 20), (zmq.HEARTBEAT_TIMEOUT, 200), (zmq.RCVTIMEO, 5000)):
            dealer.setsockopt(option, milliseconds)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(f"tcp://127.0.0.1:{server.port}")
        dealer.send_multipart([bytes(8), b"noop", b"\x90"])
        assert dealer.recv_multipart()[1] == b"ok"
        if monitor.poll(1000):  # unanswered heartbeats end it
            return False
        dealer.send_multipart([bytes(8), b"noop", b"\x90"])
        assert dealer.recv_multipart()[1] == b"ok"
        return True
    except zmq.Again:  # it ended before an answer came
        return False
    finally:
        context.destroy(linger=0)


# ---- salts -----------------------------------------------------------------------------------------------------------
def refused(call: Any) -> str:
    with pytest.raises(RemoteError) as error:
        call()
    return f"{error.value.code}: {error.value}"


def test_a_key_uses_its_salts_and_learns_nothing_of_others(server: CacheServer, keys: Path) -> None:
    with engine(server, keys, "a") as alice, engine(server, keys, "b") as bob:
        assert alice.client.memory is None  # where everybody's objects lie
        assert alice.client.hello is not None
        assert alice.client.hello.shm_path == ""
        tokens, others = alice.tokens(1, 2, 3), alice.tokens(7, 8, 9)
        hashes = alice.hashes(tokens, salt="salt-a")
        assert alice.store(tokens, salt="salt-a") == 3
        assert bob.store(tokens, salt="salt-b") == 3
        assert alice.lookup("own", tokens, salt="salt-a").chunks == 3
        # What bob has stored, what nobody has stored: the same words.
        for call in (
            lambda tokens: alice.lookup("other", tokens, salt="salt-b"),
            lambda tokens: alice.lookup("other", tokens, salt=""),
            lambda tokens: alice.hashes(tokens, salt="salt-b"),
            lambda tokens: alice.reserve(hashes, salt="salt-b"),
        ):
            stored, not_stored = refused(lambda call=call: call(tokens)), refused(lambda call=call: call(others))
            assert stored == not_stored
            assert stored.startswith("forbidden")
        assert "forbidden" in refused(lambda: alice.client.call("clear", m.Clear("l1"), CALL_SECONDS))
        assert bob.lookup("own", tokens, salt="salt-b").chunks == 3


def test_a_key_reaches_no_instance_of_another_key(server: CacheServer, keys: Path) -> None:
    with engine(server, keys, "a") as alice, engine(server, keys, "b", instance_id="bobs") as bob:
        bob.store(bob.tokens(1), salt="salt-b")
        held = bob.lookup("r", bob.tokens(1), salt="salt-b")
        assert held.lease
        calls = {
            "read": m.Read("bobs", 0, alice.client.server_epoch, held.lease, 0, 0, 0, 4096),
            "release": m.Release("bobs", held.lease),
            "end_session": m.EndSession("bobs", "r"),
            "lookup": m.Lookup("bobs", "r", "salt-a", 0, bob.tokens(1)),
            "unregister": m.Unregister("bobs", 0),
            "ping": m.Ping("bobs", 0),
            "commit": m.Commit("bobs", 0, 1, b""),
        }
        for method, message in calls.items():
            assert "unknown_instance" in refused(partial(alice.client.call, method, message, CALL_SECONDS)), method
        for method, message in {
            "register_instance": m.RegisterInstance("bobs", "model", 1, 1, 10.0, "thief"),
            "register_worker": m.RegisterWorker("bobs", 0, 0, [LAYOUT], [4096], True, 10.0, transfer_mode="socket"),
        }.items():
            assert "layout_conflict" in refused(partial(alice.client.call, method, message, CALL_SECONDS)), method
        worker = m.RegisterWorker(alice.instance_id, 1, 0, [LAYOUT], [4096], True, 10.0, transfer_mode="shm")
        assert "forbidden" in refused(lambda: alice.client.call("register_worker", worker, CALL_SECONDS))
        assert bob.read(held, salt="salt-b")


def test_how_long_a_refusal_takes_does_not_depend_on_what_is_stored(server: CacheServer, keys: Path) -> None:
    with engine(server, keys, "a") as alice, engine(server, keys, "b") as bob:
        stored, missing = bob.tokens(*range(40)), bob.tokens(*range(50, 90))
        bob.store(stored, salt="salt-b")
        seconds: dict[bytes, list[float]] = {stored: [], missing: []}
        for number in range(QUESTIONS):
            for tokens in random.Random(SEED + number).sample(list(seconds), 2):
                started = time.perf_counter()
                refused(lambda tokens=tokens: alice.lookup("other", tokens, salt="salt-b"))
                seconds[tokens].append(time.perf_counter() - started)
        longer = sum(there > not_there for there, not_there in zip(*seconds.values(), strict=True)) / QUESTIONS
        assert NO_DIFFERENCE[0] < longer < NO_DIFFERENCE[1]


# ---- keys that change ------------------------------------------------------------------------------------------------
def test_a_removed_key_ends_its_connections_and_others_stay(
    server: CacheServer, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(server, keys, "all") as steady:
        assert main(["keygen", "leaver", "--folder", str(keys), "-q"]) == 0
        allow(keys, "leaver", None)
        until(lambda: "CURVE keys were read again" in server.log())
        with engine(server, keys, "leaver") as leaver, logged_to(caplog, "lmcache.client"):
            assert leaver.store(leaver.tokens(77)) == 1
            (keys / "clients" / "leaver.pub").unlink()
            until(lambda: "does not let" in fails(leaver))
            until(lambda: any("does not let" in line for line in caplog.messages))  # an engine's log says why
            assert steady.lookup("r", steady.tokens(77)).chunks == 1
        until(lambda: "removed_or_changed" in (keys / "audit.jsonl").read_text())
        records = [json.loads(line) for line in (keys / "audit.jsonl").read_text().splitlines()]
        assert any(record["detail"]["removed_or_changed"] == ["leaver"] for record in records)


@contextlib.contextmanager
def logged_to(caplog: pytest.LogCaptureFixture, name: str) -> Iterator[None]:
    """What commands have silenced in this process."""
    logger = logging.getLogger(name)
    with caplog.at_level(logging.WARNING, logger=name):
        logger.addHandler(caplog.handler)
        try:
            yield
        finally:
            logger.removeHandler(caplog.handler)


def fails(engine: SmallEngine) -> str:
    try:
        engine.client.call("ping", m.Ping(), CALL_SECONDS)
        return ""
    except LMCacheError as error:
        return str(error)


def test_a_clear_is_in_the_audit_log_with_the_key_that_asked_for_it(server: CacheServer, keys: Path) -> None:
    with engine(server, keys, "all") as asking:
        asking.client.call("clear", m.Clear("l1"), CALL_SECONDS)
        until(lambda: "cache.clear" in (keys / "audit.jsonl").read_text())
        records = [json.loads(line) for line in (keys / "audit.jsonl").read_text().splitlines()]
        (record,) = [record for record in records if record["action"] == "cache.clear"]
        assert record["caller"] == "engine with the key all"
        assert record["detail"]["tier"] == "l1"
        assert record["outcome"] == "ok"


def test_without_the_options_nothing_of_it_is_imported() -> None:
    code = "import sys, lmcache.server, lmcache.startup; print([name for name in sys.modules if 'nacl' in name])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60.0)
    assert ran.stdout == "[]\n", ran


# ---- settings and commands -------------------------------------------------------------------------------------------
def test_the_connector_and_the_commands_take_the_keys(
    server: CacheServer, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = {
        "lmcache.mp.port": server.port,
        "lmcache.mp.curve_server_key_file": str(keys / "server.pub"),
        "lmcache.mp.curve_client_key_file": str(keys / "all.key"),
    }
    client = ConnectorSettings.read(extra).client()
    try:
        assert client.connect(CALL_SECONDS).shm_path
    finally:
        client.close()
    url = ["--rpc-url", f"tcp://127.0.0.1:{server.port}"]
    own = ["--curve-server-key-file", str(keys / "server.pub"), "--curve-client-key-file", str(keys / "all.key")]
    assert main(["ping", *url, *own]) == 0
    assert main(["ping", *url, "--timeout", "1"]) == 1
    assert main(["ping", *url, *own[:2]]) == 2
    small = ["--chunks", "2", "--chunk-mib", "0.1", "--lookup-chunks", "4", "--rounds", "2", "--clients", "1"]
    assert main(["bench", "server", *url, *own, *small]) == 0
    assert "identical" in capsys.readouterr().out


# ---- hostile clients -------------------------------------------------------------------------------------------------
def attempt(server: CacheServer, server_public: bytes, keys: tuple[bytes, bytes], rng: random.Random) -> None:
    """One connection that goes as far as it gets, or stops somewhere on the way."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10.0) as sock:
        steps = rng.randrange(4)
        client = CurveClientEnd(server_public, keys)
        if steps == 0:
            sock.sendall(os.urandom(rng.randrange(300)))
            return
        sock.sendall(GREETING)
        if steps == 1:
            return
        sock.sendall(client.hello())
        received = b""
        while len(received) < 64 + 170 and (data := sock.recv(4096)):
            received += data
        if steps == 2 or len(received) < 64 + 170:
            return
        sock.sendall(client.initiate(received[64:]))
        with contextlib.suppress(ConnectionError):
            assert b"READY" not in sock.recv(4096)


@pytest.mark.parametrize("count", [1500, pytest.param(100_000, marks=pytest.mark.slow)])
def test_connections_with_wrong_keys_cost_no_memory(server: CacheServer, keys: Path, count: int) -> None:
    public = files(keys, "all").read()[0]
    rng = random.Random(SEED)
    with engine(server, keys, "all") as honest:
        honest.store(honest.tokens(1))
        for number in range(count):
            if number == count // 5:
                warm = private_bytes(server.pid)
            wrong_server = rng.random() < 0.3
            with contextlib.suppress(ConnectionError):
                attempt(server, keypair()[0] if wrong_server else public, keypair(), rng)
            if number % 500 == 0:
                assert honest.lookup(f"r{number}", honest.tokens(1)).chunks == 1
                honest.end(f"r{number}")
        grown = private_bytes(server.pid) - warm
        print(f"{count} connections: {warm >> 10} KiB and {grown >> 10} KiB more at the end")
        assert grown < 4 << 20


def test_silent_connections_do_not_keep_honest_ones_out(server: CacheServer, keys: Path) -> None:
    silent = [socket.create_connection(("127.0.0.1", server.port), timeout=10.0) for _ in range(1200)]
    try:
        with engine(server, keys, "all") as honest:
            assert honest.store(honest.tokens(5)) <= 1
    finally:
        for sock in silent:
            sock.close()
