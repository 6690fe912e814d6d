"""CurveZMQ as the server speaks it: what proves nothing gets nothing, and nothing can be repeated, cut or reordered."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.core.limits import MIB
from lmcache.errors import ProtocolError
from lmcache.transport.curve import ClientRefused, CurveSession
from lmcache.transport.curve_clients import CurveAccess, CurveClient
from lmcache.transport.zmtp import RECEIVE_BYTES, MessageReader
from unit.transport.curve_client import GREETING, CurveClientEnd, command, keypair
from unit.transport.reading import receive

SERVER = keypair()
KNOWN, STRANGER = keypair(), keypair()
ACCESS = CurveAccess(SERVER[1], SERVER[0], {KNOWN[0]: CurveClient("engine", KNOWN[0], None)})
MESSAGE_BYTES = 4 * MIB


def new_reader() -> MessageReader:
    return MessageReader(MESSAGE_BYTES, CurveSession(lambda: ACCESS, os.urandom))


def established(reader: MessageReader, keys: tuple[bytes, bytes] = KNOWN) -> CurveClientEnd:
    client = CurveClientEnd(SERVER[0], keys)
    assert receive(reader, GREETING + client.hello()) == []
    assert receive(reader, client.initiate(reader.replies.pop())) == []
    assert reader.established
    assert reader.replies.pop()[2:8] == b"\5READY"
    return client


def test_messages_of_all_sizes_arrive_as_they_were_sent() -> None:
    reader = new_reader()
    client = established(reader)
    sizes = (0, 1, 222, 223, 255, RECEIVE_BYTES - 33, RECEIVE_BYTES, MIB, 2 * MIB, 3 * MIB, 1)
    messages = [[b"call id", b"method", os.urandom(size)] for size in sizes]
    assert receive(reader, b"".join(client.call(*message) for message in messages)) == messages
    assert reader.unfinished_bytes == 0
    assert reader.curve is not None
    assert reader.curve.client is not None
    assert reader.curve.client.name == "engine"


def test_heartbeats_are_sealed_and_count_for_no_message() -> None:
    reader = MessageReader(2048, CurveSession(lambda: ACCESS, os.urandom))
    client = established(reader)
    for _ in range(100):  # more bytes than a message may have
        assert receive(reader, client.message(b"\4PING\0\x64ctx", flags=2)) == []
    assert len(reader.replies) == 100
    assert all(b"PONG" not in reply for reply in reader.replies)
    assert receive(reader, client.call(b"a", b"b", b"c")) == [[b"a", b"b", b"c"]]


def test_a_message_beyond_the_limit_ends_the_connection() -> None:
    reader = new_reader()
    client = established(reader)
    assert receive(reader, client.call(b"a", b"b", bytes(MESSAGE_BYTES - 2)))
    with pytest.raises(ProtocolError, match="more than"):
        receive(reader, client.call(b"a", b"b", bytes(MESSAGE_BYTES + 100)))


def test_a_client_whose_key_is_not_known_is_told_so_and_no_more() -> None:
    reader = new_reader()
    client = CurveClientEnd(SERVER[0], STRANGER)
    receive(reader, GREETING + client.hello())
    with pytest.raises(ClientRefused, match="not in --zmq-curve-client-keys-dir") as refused:
        receive(reader, client.initiate(reader.replies.pop()))
    assert reader.refusal(refused.value) == b"\x04\x0a\x05ERROR\x03400"
    assert not reader.established
    assert not reader.replies


def test_a_client_that_shows_the_key_of_another_must_have_its_secret() -> None:
    reader = new_reader()
    client = CurveClientEnd(SERVER[0], (KNOWN[0], STRANGER[1]))
    receive(reader, GREETING + client.hello())
    with pytest.raises(ClientRefused, match="not made with the keys"):
        receive(reader, client.initiate(reader.replies.pop()))
    assert not reader.established


def test_a_vouch_for_another_connection_is_no_proof() -> None:
    """It holds the short-term key of its connection: a server that is talked to cannot pass it on."""
    reader = new_reader()
    client = CurveClientEnd(SERVER[0], KNOWN)
    receive(reader, GREETING + client.hello())
    welcome = reader.replies.pop()
    client.short_public = keypair()[0]  # of what is vouched for, not of the connection
    with pytest.raises(ClientRefused, match="does not have the secret key"):
        receive(reader, client.initiate(welcome))


def test_a_client_that_expects_another_server_gets_no_answer() -> None:
    reader = new_reader()
    with pytest.raises(ClientRefused, match="HELLO"):
        receive(reader, GREETING + CurveClientEnd(keypair()[0], KNOWN).hello())
    assert not reader.replies


def test_a_recorded_handshake_means_nothing_in_another_connection() -> None:
    first, second = new_reader(), new_reader()
    client = CurveClientEnd(SERVER[0], KNOWN)
    hello = client.hello()
    receive(first, GREETING + hello)
    initiate = client.initiate(first.replies.pop())
    receive(first, initiate)
    assert first.established
    receive(second, GREETING + hello)
    with pytest.raises(ClientRefused, match="does not answer this server's WELCOME"):
        receive(second, initiate)


CHEATS: dict[str, Callable[[CurveClientEnd], bytes]] = {
    "repeated": lambda client: client.message(b"a", nonce=struct.pack(">Q", client.nonce)),
    "left out": lambda client: client.message(b"a", nonce=struct.pack(">Q", client.nonce + 2)),
    "reordered": lambda client: client.message(b"a", nonce=struct.pack(">Q", 1)),
    "plain": lambda client: b"\1\1a",
    "a command outside": lambda client: b"\4" + client.message(b"a")[1:],
    "more outside": lambda client: b"\1" + client.message(b"a")[1:],
    "truncated": lambda client: b"\0\x10" + client.message(b"a")[2:18],
    "without its end": lambda client: b"\0\x21" + client.message(b"a")[2:35],
    "a bit": lambda client: client.message(b"a")[:-1] + bytes([client.message(b"a")[-1] ^ 1]),
    "odd flags": lambda client: client.message(b"a", flags=8),
    "both flags": lambda client: client.message(b"a", flags=3),
    "a long command": lambda client: client.message(bytes(1000), flags=2),
    "another handshake": lambda client: client.hello(),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_after_the_handshake_only_the_next_whole_frame_is_read(cheat: str) -> None:
    reader = new_reader()
    client = established(reader)
    with pytest.raises(ProtocolError):
        receive(reader, CHEATS[cheat](client))
    assert not reader.replies


@pytest.mark.parametrize("name", [b"READY", b"INITIATE", b"MESSAGE", b"ERROR", b"", b"PING"])
def test_a_handshake_begins_with_hello(name: bytes) -> None:
    reader = new_reader()
    with pytest.raises(ProtocolError):
        receive(reader, GREETING + command(name, bytes(300)))


def test_a_client_without_curve_is_refused_at_its_greeting() -> None:
    with pytest.raises(ProtocolError, match="this server speaks CURVE"):
        receive(new_reader(), b"\xff\0\0\0\0\0\0\0\1\x7f\3\1NULL" + bytes(48))
    with pytest.raises(ProtocolError, match="this server speaks NULL"):
        receive(MessageReader(MESSAGE_BYTES), GREETING)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_whatever_is_changed_in_a_handshake_nobody_gets_in_by_it(data: st.DataObject) -> None:
    reader = new_reader()
    client = CurveClientEnd(SERVER[0], KNOWN)
    hello = bytearray(client.hello())
    spoils_hello = data.draw(st.booleans())
    if spoils_hello:
        at = data.draw(st.integers(0, len(hello) - 1).filter(lambda at: not 10 <= at < 82))  # padding may be anything
        hello[at] ^= data.draw(st.integers(1, 255))
    try:
        receive(reader, GREETING + bytes(hello))
        if spoils_hello:
            assert not reader.replies
            return
        initiate = bytearray(client.initiate(reader.replies.pop()))
        at = data.draw(st.integers(0, len(initiate) - 1))
        initiate[at] ^= data.draw(st.integers(1, 255))
        receive(reader, bytes(initiate))
    except ProtocolError:
        pass
    assert not reader.established


@settings(max_examples=200, deadline=None)
@given(junk=st.binary(max_size=2000), cut=st.integers(1, 2000))
def test_junk_in_any_pieces_ends_in_nothing_but_a_protocol_error(junk: bytes, cut: int) -> None:
    for reader in (new_reader(), new_reader()):
        try:
            receive(reader, GREETING)
            receive(reader, junk[:cut])
            receive(reader, junk[cut:])
        except ProtocolError:
            pass
        assert not reader.established
    reader = new_reader()
    established(reader)
    try:
        assert receive(reader, junk) == []
    except ProtocolError:
        pass
