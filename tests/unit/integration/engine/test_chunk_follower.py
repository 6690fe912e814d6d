"""What the follower of a server's changes keeps for a server that has no such call."""

from __future__ import annotations

from types import SimpleNamespace

from lmcache.errors import RemoteError
from lmcache.integration.engine.announced_chunks import AnnouncedChunks, ChunkName
from lmcache.integration.engine.chunk_follower import ChunkFollower
from lmcache.protocol import messages as m


class MuteClient:
    """Of a server without the call."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.restart()

    def restart(self) -> None:
        self.hello = SimpleNamespace(server_epoch=b"e", server_version="1.0.0")

    def call(self, method: str, message: m.ChunkChanges, timeout_seconds: float) -> m.ChunkChangesReply:
        self.asked.append(len(message.asked_hashes) // 32)
        raise RemoteError(m.ErrorCode.UNKNOWN_METHOD, "no such method")


def test_a_server_without_the_call_is_not_asked_for_more_and_the_next_one_for_all_that_is_remembered() -> None:
    client, chunks = MuteClient(), AnnouncedChunks[None](most_chunks=3)
    follower: ChunkFollower[None] = ChunkFollower(
        client,  # type: ignore[arg-type]
        "engine",
        chunks,
        lambda change: None,
        lambda: 0.0,
    )

    def remember(number: int) -> None:
        name = ChunkName("", number.to_bytes(32, "big"))
        chunks.remember(name, None)
        follower.ask_for((name,))

    remember(0)
    follower.poll()
    for number in range(1, 10):
        remember(number)
        follower.poll()
        assert not follower.is_behind  # each name that it keeps would stay for ever
    client.restart()
    follower.poll()
    assert client.asked == [1, 3]
