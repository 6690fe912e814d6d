"""Who may load from whom: the token, and servers that do not fit each other."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

import pytest

from lmcache.core import limits
from lmcache.peers.access import CHALLENGE, CLIENT, prove
from lmcache.peers.protocol import HEADER, MAGIC, NONCE_BYTES, PROTOCOL_VERSION, Challenge, Hello, Introduction, Kind
from lmcache.peers.sockets import PeerRefused, PeerSocket, within
from lmcache.testing.frames import keys
from unit.l2.support import run
from unit.peers.support import Holder, Liar, holding, identity, reading, until_true

TOKEN, OTHER = "correct horse battery", "staple staple staple"


def token_file(folder: Path, token: str) -> str:
    path = folder / token[:5]
    path.write_text(token)
    return str(path)


def test_peers_with_the_same_token_load_from_each_other(tmp_path: Path) -> None:
    async def test() -> None:
        wanted, token = keys(4), token_file(tmp_path, TOKEN)
        with holding(wanted, token_file=token) as (holder,):
            async with reading([holder.address], token_file=token) as reader:
                await reader.gets(wanted)

    run(test)


@pytest.mark.parametrize(
    ("holders_token", "readers_token", "sentence"),
    [
        (TOKEN, OTHER, "the two servers have different tokens"),
        (TOKEN, "", "one of the two servers has a --p2p-token-file and the other has none"),
        ("", TOKEN, "one of the two servers has a --p2p-token-file and the other has none"),
    ],
)
def test_others_get_nothing_and_both_logs_say_why(
    holders_token: str, readers_token: str, sentence: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        wanted = keys(4)
        files = [token_file(tmp_path, token) if token else "" for token in (holders_token, readers_token)]
        with holding(wanted, token_file=files[0]) as (holder,):
            async with reading([holder.address], token_file=files[1], connects=False) as reader:
                await until_true(lambda: bool(reader.peer(holder.address)["refused"]))
                assert str(reader.peer(holder.address)["refused"]).startswith(sentence)
                assert await reader.has(wanted) == 0 and await reader.load(wanted) == 0
                assert reader.sample("p2p_failures_total", reason="refused") == 1
                await until_true(lambda: len([line for line in caplog.messages if sentence in line]) >= 2)
        assert TOKEN not in caplog.text and OTHER not in caplog.text

    with caplog.at_level(logging.INFO, "lmcache.peers"):
        run(test)


def test_who_is_not_reached_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PEER_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(limits, "MAX_PEER_RETRY_SECONDS", 0.004)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"

    async def test() -> None:
        async with reading([nobody], connects=False):
            await until_true(lambda: len(caplog.messages) > 10)

    with caplog.at_level(logging.DEBUG, "lmcache.peers"):
        run(test)
    said = [record.levelno for record in caplog.records if f"The peer {nobody} is not reached: " in record.getMessage()]
    assert said[:2] == [logging.DEBUG, logging.INFO] and set(said[2:]) == {logging.DEBUG}


def test_a_token_that_is_replaced_counts_from_the_next_connection_on(tmp_path: Path) -> None:
    async def test() -> None:
        wanted, token = keys(4), token_file(tmp_path, TOKEN)
        with holding(wanted, token_file=token) as (holder,):
            Path(token).write_text(OTHER)
            own = str(tmp_path / "own")
            Path(own).write_text(TOKEN)
            async with reading([holder.address], token_file=own, connects=False) as reader:
                await until_true(lambda: bool(reader.peer(holder.address)["refused"]))
            async with reading([holder.address], token_file=token) as reader:
                await reader.finds(wanted)

    run(test)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"chunk_tokens": 128}, "the servers have --chunk-size"),
    ],
)
def test_servers_that_name_chunks_differently_refuse_each_other(
    options: dict[str, int], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        wanted = keys(4)
        with holding(wanted) as (holder,):
            async with reading([holder.address], connects=False, **options) as reader:
                await until_true(lambda: len([line for line in caplog.messages if sentence in line]) >= 2)
                assert await reader.has(wanted) == 0

    with caplog.at_level(logging.INFO, "lmcache.peers"):
        run(test)


@pytest.mark.parametrize("with_token", [True, False])
def test_a_server_in_between_that_passes_the_handshake_on_is_refused(with_token: bool, tmp_path: Path) -> None:
    async def test() -> None:
        token = token_file(tmp_path, TOKEN) if with_token else ""

        async def pass_on(_: Liar, caller: PeerSocket) -> None:
            server = await call(holder)
            try:
                for source, target in ((caller, server), (server, caller)) * 2:
                    kind, number, body = await source.receive()
                    await target.send_packed(HEADER.pack(MAGIC, kind, 0, number, len(body)) + body)
                await caller.receive()
            finally:
                server.close()

        with holding(keys(4), token_file=token) as (holder,):
            async with (
                Liar(pass_on, holder) as between,
                reading([between.address], token_file=token, connects=False) as reader,
            ):
                await until_true(lambda: bool(reader.peer(between.address)["refused"]))
                sentence = f"the server at {between.address} says that it is '{holder.address}': name peers by their"
                assert str(reader.peer(between.address)["refused"]).startswith(sentence)
                assert not reader.peer(between.address)["connected"]

    run(test)


async def call(holder: Holder) -> PeerSocket:
    raw = socket.socket()
    raw.setblocking(False)
    host, _, port = holder.address.rpartition(":")
    await asyncio.get_running_loop().sock_connect(raw, (host, int(port)))
    return PeerSocket(raw)


@pytest.mark.parametrize("attack", ["no proof", "reflected", "replayed", "other identity", "no handshake"])
def test_nobody_gets_in_without_the_token(attack: str, tmp_path: Path) -> None:
    async def test() -> None:
        with holding(keys(4), token_file=token_file(tmp_path, TOKEN)) as (holder,):
            sock = await call(holder)
            nonce = bytes(NONCE_BYTES)
            packed = identity("127.0.0.1:1").pack()
            await sock.send(Kind.HELLO, 0, Hello(PROTOCOL_VERSION, nonce, True))
            challenge = await sock.expect(Kind.CHALLENGE, 0, Challenge)
            assert challenge.proof == prove(TOKEN, CHALLENGE, nonce, challenge.nonce)
            proofs = {
                "no proof": b"",
                "reflected": challenge.proof,
                "replayed": prove(TOKEN, CLIENT, nonce, nonce, packed),
                "other identity": prove(TOKEN, CLIENT, nonce, challenge.nonce, b"x" + packed),
            }
            if attack == "no handshake":
                await sock.send(Kind.READ, 1, Introduction(b"", b""))
            else:
                await sock.send(Kind.PROOF, 0, Introduction(packed, proofs[attack]))
            with pytest.raises(PeerRefused):
                await within(20.0, sock.expect(Kind.WELCOME, 0, Introduction))
            sock.close()

    run(test)
