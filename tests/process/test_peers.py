"""Two and three real servers that load from each other: exact bytes or a miss, whatever becomes of the other server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmcache.core.chunking import ChunkHasher
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.peers.connections import connect
from lmcache.peers.handshake import Introducer
from lmcache.peers.identity import Identity
from lmcache.peers.protocol import Found, Kind, Lookup
from lmcache.peers.transports.library import ENGINES
from lmcache.protocol.messages import Lookup as EngineLookup
from lmcache.protocol.messages import Source
from lmcache.testing.processes import CacheServer, free_port
from polling import until
from process.memory_watch import children
from process.support import SmallEngine, held, unpack_slots
from services import need_engine

PAYLOAD_BYTES = 1 << 18
CHUNKS = 24


class PeerServer(CacheServer):
    def __init__(
        self,
        folder: Path,
        name: str,
        peer_port: int,
        peers: Sequence[int],
        extra: Sequence[str] = (),
        l1_size_gb: float = 0.0625,
    ) -> None:
        self.peer_address = f"127.0.0.1:{peer_port}"
        p2p = ["--p2p-advertise-url", self.peer_address, "--p2p-peers", ",".join(f"127.0.0.1:{port}" for port in peers)]
        super().__init__(folder, l1_size_gb=l1_size_gb, extra=[*p2p, *extra], log_name=f"{name}.log")

    def peer(self, address: str) -> dict[str, Any]:
        (found,) = [
            peer
            for adapter in self.status()["l2"]["adapters"]
            for peer in adapter.get("peers", ())
            if peer["address"] == address
        ]
        return dict(found)


@contextlib.contextmanager
def servers(
    folder: Path, *extras: Sequence[str], connects: bool = True, l1_size_gb: float = 0.0625
) -> Iterator[list[PeerServer]]:
    """As many as there are `extras`, which know each other. Those that run at the end hold nothing, and stop with 0."""
    ports = [free_port() for _ in extras]
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(PeerServer(folder, f"server-{number}", ports[number], ports, extra, l1_size_gb))
            for number, extra in enumerate(extras)
        ]
        for server in started:
            server.wait_ready()
        if connects:
            until(lambda: all(server.metric("lmcache_mp_p2p_peers") == len(extras) - 1 for server in started))
        yield started
        for server in started:
            if server.alive():
                until(lambda server=server: idle(server), tell=server.status)
                assert "Traceback" not in server.log() and "ended by a fault" not in server.log()
                assert server.stop() == 0


def transfers_by(engine: str) -> list[str]:
    need_engine(engine)
    return ["--p2p-transfer-engine", engine, *(["--p2p-without-token"] if engine in ENGINES else [])]


def idle(server: CacheServer) -> bool:
    status = server.status()
    return not held(server) and not status["p2p"]["leases"] and not status["l2"]["prefetch"]["bytes_in_flight"]


def engine_at(server: CacheServer, **options: Any) -> SmallEngine:
    return SmallEngine(server.port, payload_bytes=PAYLOAD_BYTES, **options)


def hit(engine: SmallEngine, tokens: bytes, *, salt: str = "", seconds: float = 10.0) -> int:
    """The chunks of one lookup, each exact."""
    request = f"r{time.monotonic_ns()}"
    reply = engine.lookup(request, tokens, salt=salt, deadline_seconds=seconds)
    assert engine.read(reply, salt=salt)
    engine.end(request)
    return reply.chunks


@pytest.mark.parametrize("engine_of_transfers", ["auto", "tcp", *ENGINES])
def test_what_one_server_stored_another_serves(engine_of_transfers: str, tmp_path: Path) -> None:
    options = transfers_by(engine_of_transfers)
    with servers(tmp_path, options, options) as (a, b), engine_at(a) as at_a, engine_at(b) as at_b:
        tokens = at_a.tokens(*range(1, 1 + CHUNKS))
        assert at_a.store(tokens) == CHUNKS
        until(lambda: hit(at_b, tokens) == CHUNKS)
        assert hit(at_b, tokens, salt="tenant") == 0
        with SmallEngine(b.port, payload_bytes=PAYLOAD_BYTES, layout="77" * 16) as other_layout:
            assert hit(other_layout, tokens) == 0
        transport = "shared_memory" if engine_of_transfers == "auto" else engine_of_transfers
        described = subprocess.run(
            [sys.executable, "-m", "lmcache.cli.main", "describe", "--url", f"http://127.0.0.1:{b.http_port}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert re.search(rf"Peer {a.peer_address}.*connected by {transport}, .* loaded", described)
        # What B stores reaches A the same way, and is nowhere written but in B.
        more = at_a.tokens(*range(100, 100 + CHUNKS))
        at_b.store(more)
        until(lambda: hit(at_a, more) == CHUNKS)
        b.clear("l2")
        assert a.status()["l1"]["objects"] and b.status()["l2"]["store"]["queued_objects"] == 0
        for name in (
            f'lmcache_mp_p2p_received_bytes_total{{transport="{transport}"}}',
            *(
                "lmcache_mp_p2p_lookups_total",
                "lmcache_mp_p2p_hits_chunks_total",
                "lmcache_mp_p2p_lookup_seconds_count",
            ),
            *("lmcache_mp_p2p_load_seconds_count", "lmcache_mp_p2p_served_lookups_total", "lmcache_mp_p2p_peers"),
        ):
            assert b.metric(name) > 0, name
        assert (a.metric("lmcache_mp_p2p_sent_bytes_total") > 0) == (engine_of_transfers == "tcp")


def test_a_prefix_comes_from_two_servers(tmp_path: Path) -> None:
    with (
        servers(tmp_path, [], [], []) as (a, b, c),
        engine_at(a) as at_a,
        engine_at(b) as at_b,
        engine_at(c) as at_c,
    ):
        tokens = at_a.tokens(*range(1, 1 + CHUNKS))
        at_a.store(at_a.tokens(*range(1, 1 + CHUNKS // 2)))
        rest = at_b.hashes(tokens)[CHUNK_HASH_BYTES * (CHUNKS // 2) :]
        reserved = at_b.reserve(rest)
        at_b.fill(rest, unpack_slots(reserved.slots))
        assert at_b.commit(reserved.reservation) == CHUNKS // 2
        until(lambda: hit(at_c, tokens) == CHUNKS)
        assert c.peer(a.peer_address)["received_bytes"] and c.peer(b.peer_address)["received_bytes"]
        a.kill()
        until(lambda: hit(at_c, tokens) == 0)


@pytest.mark.parametrize("engine_of_transfers", ["tcp", *ENGINES])
@pytest.mark.parametrize("act", ["kill", "pause"])
def test_a_peer_that_dies_or_stands_still_while_it_is_read(act: str, engine_of_transfers: str, tmp_path: Path) -> None:
    """Every lookup is answered, exactly, and afterwards nothing of it is held anywhere."""
    options = transfers_by(engine_of_transfers)
    with servers(tmp_path, options, options) as (a, b), engine_at(a) as at_a, engine_at(b) as at_b:
        prompts = [at_a.tokens(*range(first, first + CHUNKS)) for first in range(0, 4 * CHUNKS, CHUNKS)]
        for tokens in prompts:
            at_a.store(tokens)
        until(lambda: hit(at_b, prompts[0]) == CHUNKS)
        replies = []
        for number, tokens in enumerate(prompts * 3):
            if number == 4:
                (a.kill if act == "kill" else a.pause)()
            started = time.monotonic()
            replies.append(hit(at_b, tokens, seconds=30.0))
            assert time.monotonic() - started < 40
        assert replies[-1] == 0
        until(lambda: hit(at_b, prompts[0]) == 0)
        started = time.monotonic()
        for tokens in prompts:
            hit(at_b, tokens)
        assert time.monotonic() - started < 5 * len(prompts)  # it is left alone by now
        if act == "pause":
            assert b.metric("lmcache_mp_p2p_late_lookups_total") > 0
            a.resume()
            until(lambda: hit(at_b, prompts[0]) == CHUNKS, 120.0)
        else:
            until(lambda: not b.peer(a.peer_address)["connected"])


@pytest.mark.parametrize("engine_of_transfers", ["auto", *ENGINES])
def test_a_peer_that_was_restarted_serves_what_it_has_now(engine_of_transfers: str, tmp_path: Path) -> None:
    options = transfers_by(engine_of_transfers)
    with servers(tmp_path, options, options) as (a, b), engine_at(a) as at_a, engine_at(b) as at_b:
        tokens = at_a.tokens(*range(1, 1 + CHUNKS))
        at_a.store(tokens)
        until(lambda: hit(at_b, tokens) == CHUNKS)
        a.kill()
        (Path("/dev/shm") / a.shm_name).unlink(missing_ok=True)
        peer_port = int(a.peer_address.rpartition(":")[2])
        again = PeerServer(tmp_path, "again", peer_port, [peer_port, int(b.peer_address.rpartition(":")[2])], options)
        with again:
            again.wait_ready()
            until(lambda: b.peer(a.peer_address)["connected"])
            assert hit(at_b, tokens) == 0
            with engine_at(again) as at_again:
                at_again.store(tokens)
                until(lambda: hit(at_b, tokens) == CHUNKS)
            until(lambda: idle(again))
            assert again.stop() == 0


@pytest.mark.parametrize("engine_of_transfers", ENGINES)
def test_memory_that_l1_grows_by_is_reached_too(engine_of_transfers: str, tmp_path: Path) -> None:
    options = [*transfers_by(engine_of_transfers), "--l1-use-lazy", "--l1-init-size-gb", "0.01"]
    count = 300  # of chunks, more than the 64 MiB that a lazy L1 begins with
    with servers(tmp_path, options, options, l1_size_gb=0.5) as (a, b), engine_at(a) as at_a, engine_at(b) as at_b:
        tokens = at_a.tokens(*range(1, 1 + count))
        assert at_a.store(tokens) == count
        until(lambda: hit(at_b, tokens) == count)
        received = 'lmcache_mp_p2p_received_bytes_total{{transport="{}"}}'
        assert b.metric(received.format(engine_of_transfers)) >= count * PAYLOAD_BYTES
        assert b.metric(received.format("tcp")) == 0


@pytest.mark.parametrize("engine_of_transfers", ENGINES)
def test_no_process_of_a_transfer_engine_outlives_its_server(engine_of_transfers: str, tmp_path: Path) -> None:
    options = transfers_by(engine_of_transfers)
    with servers(tmp_path, options, options) as (a, b):
        of_a, of_b = children(a.pid), children(b.pid)
        assert len(of_a) == len(of_b) == 2
        for pid in of_a:  # no signal but the one that they get from their server's death is heeded
            os.kill(pid, signal.SIGSTOP)
        a.kill()
        assert b.stop() == 0
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in of_a + of_b))


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        (["--chunk-size", "128"], [], "the servers have --chunk-size"),
        pytest.param(
            ["--hash-algorithm", "sha256_cbor"], [], "the servers have --hash-algorithm", marks=pytest.mark.slow
        ),
        (
            ["--p2p-token-file", "{folder}/one"],
            ["--p2p-token-file", "{folder}/two"],
            "the two servers have different tok",
        ),
        pytest.param(
            ["--p2p-token-file", "{folder}/one"],
            [],
            "one of the two servers has a --p2p-token-file and the other has none",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_servers_that_do_not_fit_say_why_and_serve_their_engines(
    first: Sequence[str], second: Sequence[str], sentence: str, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(name * 10)
        (tmp_path / name).chmod(0o600)
    extras = [[word.format(folder=tmp_path) for word in extra] for extra in (first, second)]
    with servers(tmp_path, *extras, connects=False) as (a, b), engine_at(a) as at_a, engine_at(b) as at_b:
        until(lambda: sentence in a.log() and sentence in b.log(), tell=lambda: a.log() + b.log())
        tokens = at_a.tokens(*range(1, 5))
        at_a.store(tokens)
        assert hit(at_b, tokens) == 0 and hit(at_a, tokens) == 4
        until(lambda: b.metric('lmcache_mp_p2p_failures_total{reason="refused"}') > 0)
        assert "oneone" not in a.log() + b.log() + str(a.status()) + str(b.status())


def test_what_a_peer_looked_up_is_kept_for_it_until_it_goes(tmp_path: Path) -> None:
    """lmcache_mp_p2p_leased_bytes, of a peer that reads nothing."""

    async def look_up(tokens_hashes: bytes, digest: bytes) -> None:
        hasher = ChunkHasher("blake3", 256)
        identity = Identity(bytes(16), "127.0.0.1:1", 256, "blake3", hasher.sample())
        port = int(a.peer_address.rpartition(":")[2])
        sock, _ = await connect("127.0.0.1", port, Introducer(identity, "", os.urandom))
        await sock.send(Kind.LOOKUP, 1, Lookup(digest * 4, tokens_hashes))
        found = await sock.expect(Kind.FOUND, 1, Found)
        assert found.lease and 0 not in array("Q", found.sizes)
        assert await asyncio.to_thread(a.metric, "lmcache_mp_p2p_leased_bytes") == 4 * (PAYLOAD_BYTES + 4096)
        sock.close()

    with servers(tmp_path, [], connects=False) as (a,), engine_at(a) as at_a:
        tokens = at_a.tokens(*range(1, 5))
        at_a.store(tokens)
        asyncio.run(look_up(at_a.hashes(tokens), at_a.namespace("").digest))
        until(lambda: a.metric("lmcache_mp_p2p_leased_bytes") == 0)


def test_a_lookup_that_names_a_server_waits_for_what_is_stored_there(tmp_path: Path) -> None:
    """Prefill and decode apart, a server each: the first engine's answer names its server, and the second one asks its
    own server, while the first is still storing."""
    with servers(tmp_path, [], []) as (a, b), engine_at(a) as at_a, engine_at(b) as at_b:
        hello = at_a.client.hello
        assert hello is not None and hello.peer_address == a.peer_address
        tokens = at_a.tokens(*range(1, 1 + CHUNKS))
        hashes = at_a.hashes(tokens)
        reserved = at_a.reserve(hashes)
        source = Source(at_a.instance_id, hello.peer_address, hello.server_epoch, len(tokens) // 4, 30.0)
        lookup = EngineLookup(at_b.instance_id, "r", "", 0, tokens, deadline_seconds=60.0, source=source)
        pending = at_b.client.submit("lookup", lookup, 60.0)
        until(lambda: a.status()["p2p"]["waiting_lookups"] == 1, tell=a.status)
        assert not pending.done()
        at_a.fill(hashes, unpack_slots(reserved.slots))
        assert at_a.commit(reserved.reservation) == CHUNKS
        reply = pending.result()
        assert reply.chunks == CHUNKS and at_b.read(reply)
        at_b.end("r")
