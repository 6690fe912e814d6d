"""An engine that follows the changes of a real server: L1, an adapter, an adapter that encodes, and a restart."""

from __future__ import annotations

from pathlib import Path

from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.protocol import messages as m
from lmcache.testing.processes import CacheServer
from polling import until
from process.support import CALL_SECONDS, SmallEngine

IN_L1, IN_L2 = 1, 2
CHUNKS = 3


class Follower:
    """What it knows of an engine's chunks, from its answers alone."""

    def __init__(self, engine: SmallEngine) -> None:
        self._engine = engine
        self._cursor: list[int] = []
        self.tiers: dict[bytes, int] = {}
        self.lost = 0

    def read(self, asked: bytes = b"") -> dict[bytes, int]:
        hello = self._engine.client.hello
        assert hello is not None
        message = m.ChunkChanges(
            self._engine.instance_id,
            hello.server_epoch,
            self._cursor,
            [""],
            bytes(4 * (len(asked) // CHUNK_HASH_BYTES)),
            asked,
        )
        reply: m.ChunkChangesReply = self._engine.client.call("chunk_changes", message, CALL_SECONDS)
        self._cursor = reply.cursor
        self.lost += reply.lost
        assert not reply.unused_salts
        self.tiers |= zip(split(reply.hashes), reply.tiers, strict=True)
        return self.tiers


def split(hashes: bytes) -> list[bytes]:
    return [hashes[start : start + CHUNK_HASH_BYTES] for start in range(0, len(hashes), CHUNK_HASH_BYTES)]


def test_changes_of_every_tier_and_of_a_server_that_restarts(tmp_path: Path) -> None:
    adapters = [
        f'{{"type": "fs_native", "base_path": "{tmp_path}/plain"}}',
        f'{{"type": "fs_native", "base_path": "{tmp_path}/encoded", "serde": {{"type": "exponent"}}}}',
    ]
    extra = [word for adapter in adapters for word in ("--l2-adapter", adapter)]
    server = CacheServer(tmp_path, l1_size_gb=0.05, extra=extra)
    try:
        server.wait_ready()
        with SmallEngine(server.port) as engine:
            tokens = engine.tokens(*range(CHUNKS))
            engine.lookup("first", tokens)
            engine.end("first")
            follower = Follower(engine)
            names = split(engine.hashes(tokens))
            follower.read()
            assert follower.lost == 1
            engine.store(tokens)
            until(lambda: follower.read() == dict.fromkeys(names, IN_L1 | IN_L2), tell=lambda: follower.tiers)
            server.clear("l1")
            assert follower.read() == dict.fromkeys(names, IN_L2)
            reply = engine.lookup("second", tokens)
            assert reply.chunks == CHUNKS
            assert set(follower.read().values()) == {IN_L1 | IN_L2}
            engine.end("second")  # what was loaded for it goes with it
            until(lambda: set(follower.read().values()) == {IN_L2}, tell=lambda: follower.tiers)
            server.clear("all")
            assert follower.read() == dict.fromkeys(names, 0)
            assert follower.lost == 1
            engine.store(tokens)
            until(lambda: set(follower.read().values()) == {IN_L1 | IN_L2}, tell=lambda: follower.tiers)
            epoch = engine.client.server_epoch
            server.stop()
            server = CacheServer(
                tmp_path,
                l1_size_gb=0.05,
                port=server.port,
                http_port=server.http_port,
                shm_name=server.shm_name,
                extra=extra,
            )
            server.wait_ready()
            until(lambda: engine.client.server_epoch != epoch and engine.client.owner(engine.instance_id, 0))
            engine.lookup("third", tokens[:4])  # too short: it says that the salt is used
            until(lambda: follower.read(b"".join(names)) == dict.fromkeys(names, IN_L2), tell=lambda: follower.tiers)
            assert follower.lost == 2
    finally:
        server.stop()
