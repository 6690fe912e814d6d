"""The end of a prompt that one engine computes for another, through real servers: exact bytes on every way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmcache.client.transfer_mode import WantedTransfer
from lmcache.protocol import messages as m
from lmcache.protocol.tokens import pack_tokens
from lmcache.testing.processes import CacheServer
from polling import until
from process.support import CALL_SECONDS, SmallEngine, unpack_slots
from process.test_peers import engine_at, servers

PARTIAL = 48
LAST = pack_tokens(list(range(PARTIAL + 5)))


def store(engine: SmallEngine, tokens: bytes) -> int:
    append = m.Append(engine.instance_id, "prefill", "", 0, tokens, partial_tokens=PARTIAL)
    named: m.AppendReply = engine.client.call("append", append, CALL_SECONDS)
    assert named.partial_tokens == PARTIAL
    engine.end("prefill")
    reply = engine.reserve(named.hashes)
    if engine.client.memory is None:
        engine.send(named.hashes, reply)
    else:
        engine.fill(named.hashes, unpack_slots(reply.slots))
    return engine.commit(reply.reservation)


def hit(engine: SmallEngine, tokens: bytes, partial: int = PARTIAL) -> int:
    """Chunks, which are exactly what was stored."""
    lookup = m.Lookup(engine.instance_id, "decode", "", 0, tokens, deadline_seconds=10.0, partial_tokens=partial)
    reply: m.LookupReply = engine.client.call("lookup", lookup, CALL_SECONDS)
    assert engine.read(reply)
    engine.end("decode")
    return reply.chunks


def test_a_peer_gives_it(tmp_path: Path) -> None:
    with (
        servers(tmp_path, (), ()) as (one, other),
        engine_at(one) as prefill,
        engine_at(other) as decode,
    ):
        tokens = prefill.tokens(1, 2, 3) + LAST
        assert store(prefill, tokens) == 4
        until(lambda: hit(decode, tokens) == 4)
        until(lambda: hit(decode, tokens, PARTIAL - 1) == 3)
        assert hit(decode, tokens, PARTIAL - 1) <= 3, "another length"


@pytest.mark.parametrize("transfer", [WantedTransfer.SHM, WantedTransfer.SOCKET])
def test_a_later_server_has_it_in_l2(tmp_path: Path, transfer: WantedTransfer) -> None:
    adapter = json.dumps({"type": "fs", "base_path": str(tmp_path / "l2")})
    tokens = b""
    for is_first in (True, False):
        with CacheServer(tmp_path, l1_size_gb=0.0625, extra=["--l2-adapter", adapter]) as server:
            server.wait_ready()
            with SmallEngine(server.port, transfer=transfer) as engine:
                if is_first:
                    tokens = engine.tokens(1) + LAST
                    assert store(engine, tokens) == 2
                    until(lambda server=server: server.status()["l2"]["adapters"][0]["objects"] == 2)
                until(lambda engine=engine, tokens=tokens: hit(engine, tokens) == 2)
                assert hit(engine, LAST) == 0
            assert server.stop() == 0
