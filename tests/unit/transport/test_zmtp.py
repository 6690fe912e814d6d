"""The reader of ZMTP: whole messages out of any pieces, and never more memory than what has arrived of one message."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.core.limits import MIB
from lmcache.errors import ProtocolError
from lmcache.transport.zmtp import MAX_FRAMES, NO_MESSAGE, READY, RECEIVE_BYTES, MessageReader, frame_head
from unit.transport.reading import receive

GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1NULL" + bytes(48)
CLIENT_READY = b"\4\x29\5READY\x0bSocket-Type\0\0\0\6DEALER\x08Identity\0\0\0\0"
MESSAGE_BYTES = 4 * MIB


def encoded(*frames: bytes) -> bytes:
    heads = [frame_head(len(frame), more=number + 1 < len(frames)) for number, frame in enumerate(frames)]
    return b"".join(head + frame for head, frame in zip(heads, frames, strict=True))


def established() -> MessageReader:
    reader = MessageReader(MESSAGE_BYTES)
    assert receive(reader, GREETING + CLIENT_READY) == []
    assert reader.established
    assert reader.replies == [READY]
    reader.replies.clear()
    return reader


def test_messages_of_all_sizes() -> None:
    messages = [
        [b"call id", b"method", bytes([number]) * size]
        for number, size in enumerate((0, 1, 255, 256, RECEIVE_BYTES, RECEIVE_BYTES + 1, MIB, 2 * MIB, 3 * MIB, 1))
    ]
    reader = established()
    assert receive(reader, b"".join(encoded(*message) for message in messages)) == messages
    assert reader.unfinished_bytes == 0


@pytest.mark.parametrize("count", [1, 2, 4, MAX_FRAMES])
def test_a_message_of_another_number_of_frames_is_empty(count: int) -> None:
    reader = established()
    call = [b"a", b"b", b"c"]
    assert receive(reader, encoded(*[b"x"] * count) + encoded(*call)) == [[], call]


def test_heartbeats_are_answered_between_the_frames_of_a_message() -> None:
    reader = established()
    assert receive(reader, b"\1\1a" + b"\4\x0a\4PING\0\x64ctx" + b"\1\1b\0\1c") == [[b"a", b"b", b"c"]]
    assert reader.replies == [b"\4\x08\4PONGctx"]


def test_a_command_counts_as_a_message() -> None:
    """Else a peer that sends thousands of them at once makes everybody wait for one turn."""
    reader = established()
    reader.feed(b"\4\7\4PING\0\0" * 100 + encoded(b"a", b"b", b"c"))
    for read in range(1, 101):
        assert reader.next() is NO_MESSAGE
        assert len(reader.replies) == read
    assert reader.next() == [b"a", b"b", b"c"]


@pytest.mark.parametrize(
    ("blast", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not speak ZMTP"),
        (b"\xff" + bytes(8) + b"\x7e", "does not speak ZMTP"),
        (b"\xff\0\0\0\0\0\0\0\1\x7f\1", "version of ZMTP before 3"),
        (b"\xff\0\0\0\0\0\0\0\1\x7f\3\1CURVE" + bytes(47), "mechanism b'CURVE'"),
        (GREETING + b"\0\1x", "before the handshake"),
        (GREETING + b"\2" + struct.pack(">Q", MIB), "before the handshake"),
        (GREETING + CLIENT_READY.replace(b"DEALER", b"PUSHER"), "not that of a client"),
        (GREETING + b"\4\6\5ERROR", "not that of a client"),
        (GREETING + b"\4\0", "not that of a client"),
        (GREETING + b"\6" + struct.pack(">Q", 1 << 40), "no frame of ZMTP"),
        (GREETING + CLIENT_READY + b"\x08\0", "no frame of ZMTP"),
        (GREETING + CLIENT_READY + b"\2" + b"\xff" * 8, "more than 4194304 bytes"),
        (GREETING + CLIENT_READY + encoded(bytes(MESSAGE_BYTES), b"x"), "more than"),
        (GREETING + CLIENT_READY + b"\1\0" * (MAX_FRAMES + 1), "more than 64 frames"),
    ],
)
def test_what_ends_a_connection(blast: Any, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        receive(MessageReader(MESSAGE_BYTES), blast)


def test_an_announced_size_takes_no_memory() -> None:
    reader = established()
    assert receive(reader, b"\3" + struct.pack(">Q", MESSAGE_BYTES) + b"some") == []
    assert reader.unfinished_bytes == 4


FRAMES = st.lists(st.binary(max_size=300), min_size=1, max_size=5)


@settings(max_examples=200)
@given(messages=st.lists(FRAMES, max_size=8), cuts=st.lists(st.integers(1, 700), max_size=30))
def test_pieces_do_not_matter(messages: Any, cuts: Any) -> None:
    stream = GREETING + CLIENT_READY + b"".join(encoded(*frames) for frames in messages)
    reader, got = MessageReader(MESSAGE_BYTES), []
    for cut in cuts:
        got += receive(reader, stream[:cut])
        stream = stream[cut:]
    got += receive(reader, stream)
    assert got == [frames if len(frames) == 3 else [] for frames in messages]
    assert reader.unfinished_bytes == 0


@settings(max_examples=400)
@given(
    messages=st.lists(FRAMES, max_size=4),
    damage=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=6),
    from_start=st.booleans(),
)
def test_damaged_streams_end_the_connection_or_are_read(messages: Any, damage: Any, from_start: Any) -> None:
    stream = bytearray(GREETING + CLIENT_READY + b"".join(encoded(*frames) for frames in messages))
    intact = 0 if from_start else len(GREETING + CLIENT_READY)
    for at, value in damage:
        if intact <= at < len(stream):
            stream[at] = value
    reader = MessageReader(1000)
    try:
        for start in range(0, len(stream), 50):
            receive(reader, bytes(stream[start : start + 50]))
            assert reader.unfinished_bytes <= start + 50
            assert len(reader.replies) <= len(stream)
    except ProtocolError:
        pass
