"""The encoding of every message is pinned: engines and servers of different ages talk to each other.

A change here is a change of the protocol. New fields go to the end, with a default; then the old bytes still decode.
"""

import json
from pathlib import Path

import msgspec
import pytest

from lmcache.protocol import messages as m
from lmcache.transport import wire

GOLDEN = Path(__file__).parents[2] / "golden" / "wire_v1.json"

EXAMPLES: dict[str, m.Message] = {
    "Hello": m.Hello(1, "0.1.0"),
    "HelloReply": m.HelloReply(
        1, "0.1.0", bytes(range(16)), 256, "blake3", ["shm"], "/dev/shm/lmcache-5555", 1 << 32, 300.0, 600.0
    ),
    "Ping": m.Ping("engine-1", 0, bytes(range(16))),
    "PingReply": m.PingReply(bytes(range(16)), True, False),
    "RegisterInstance": m.RegisterInstance("engine-1", "model", 2, 1, 10.0, "vllm 0.32.0", [0, 511], bytes(range(16))),
    "RegisterWorker": m.RegisterWorker(
        "engine-1", 1, 1, ["ab" * 16], [2 << 20], False, 5.0, [("bfloat16", [8, 2, 4, 128, 128])]
    ),
    "RegisterReply": m.RegisterReply(7),
    "Unregister": m.Unregister("engine-1", -1, bytes(range(16))),
    "Lookup": m.Lookup("engine-1", "req-1", "tenant", 512, b"\1\0\0\0\2\0\0\0", b"lora", [(2, bytes(range(32)))], 1.5),
    "LookupReply": m.LookupReply(2, 1, 9, bytes(64), bytes(16), "not_stored"),
    "Release": m.Release("engine-1", 9, [1]),
    "EndSession": m.EndSession("engine-1", "req-1"),
    "Reserve": m.Reserve("engine-1", 1, "tenant", bytes(range(32)), b"\1\0"),
    "ReserveReply": m.ReserveReply(3, b"\xff" * 8, 1),
    "Commit": m.Commit("engine-1", 1, 3, b"\1"),
    "CommitReply": m.CommitReply(1),
    "Append": m.Append("engine-1", "req-1", "tenant", 0, b"\1\0\0\0"),
    "AppendReply": m.AppendReply(0, bytes(32)),
    "LookupKeys": m.LookupKeys("engine-1", 0, "get-7", "tenant", bytes(range(32)), 1.5),
    "ProbeKeys": m.ProbeKeys("engine-1", 0, "tenant", bytes(range(32)), 1.5, 64),
    "ProbeKeysReply": m.ProbeKeysReply(b"\0\1\2"),
    "ChunkChanges": m.ChunkChanges(
        "engine-1", bytes(range(16)), [3, 70_000, 12], ["tenant"], bytes(4), bytes(range(32)), True, [5, 1, 0, 2]
    ),
    "ChunkChangesReply": m.ChunkChangesReply([3, 70_001, 12], False, True, [1], bytes(4), bytes(range(32)), b"\3"),
    "Write": m.Write("engine-1", 1, bytes(range(16)), 3, 0, 2, 4096, memoryview(b"part")),
    "WriteReply": m.WriteReply(4100),
    "Read": m.Read("engine-1", 1, bytes(range(16)), 9, 0, 2, 4096, 4),
    "ReadReply": m.ReadReply(memoryview(b"part")),
    "Clear": m.Clear("l2"),
    "ClearReply": m.ClearReply(5, 1 << 33),
    "Empty": m.Empty(),
}


WITH_SOURCE = "Lookup with a source"
LOOKUP_WITH_SOURCE = m.Lookup(
    *("engine-2", "req-1", "", 0, b"\1\0\0\0"),
    source=m.Source("engine-1", "10.0.0.7:9500", bytes(range(16)), 8192, 10.0),
)

# How many fields were added at the end since the first version.
ADDED = {
    "Hello": 1,
    "HelloReply": 1,
    "Ping": 1,
    "Lookup": 5,
    "LookupReply": 1,
    "Append": 1,
    "AppendReply": 1,
    "Release": 2,
    "Reserve": 1,
    "RegisterInstance": 1,
}


def golden() -> dict[str, str]:
    return dict(json.loads(GOLDEN.read_text()))


def test_every_message_has_an_example() -> None:
    used = {message_type.__name__ for pair in m.METHODS.values() for message_type in pair}
    assert used == set(EXAMPLES) == set(golden()) - {"error sentence", "call id 258", WITH_SOURCE}


@pytest.mark.parametrize("name", EXAMPLES)
def test_messages_are_encoded_as_ever(name: str) -> None:
    assert wire.encode_payload(EXAMPLES[name]).hex() == golden()[name]


@pytest.mark.parametrize("name", EXAMPLES)
def test_messages_are_decoded_as_ever(name: str) -> None:
    example = EXAMPLES[name]
    assert wire.decoder_of(type(example)).decode(bytes.fromhex(golden()[name])) == example


@pytest.mark.parametrize("name", EXAMPLES)
def test_fields_of_a_later_version_are_ignored(name: str) -> None:
    example = EXAMPLES[name]
    fields = msgspec.msgpack.decode(wire.encode_payload(example))
    longer = msgspec.msgpack.encode([*fields, "something new"])
    assert wire.decoder_of(type(example)).decode(longer) == example


def test_the_source_of_a_lookup_is_encoded_as_ever() -> None:
    assert wire.encode_payload(LOOKUP_WITH_SOURCE).hex() == golden()[WITH_SOURCE]
    assert wire.decoder_of(m.Lookup).decode(bytes.fromhex(golden()[WITH_SOURCE])) == LOOKUP_WITH_SOURCE


def test_fields_with_defaults_may_be_missing() -> None:
    fields = msgspec.msgpack.decode(wire.encode_payload(EXAMPLES["RegisterWorker"]))
    decoded = wire.decoder_of(m.RegisterWorker).decode(msgspec.msgpack.encode(fields[:5]))
    assert (decoded.stores, decoded.heartbeat_interval_seconds) == (True, 10.0)


def test_call_ids_and_sentences() -> None:
    assert wire.pack_call_id(258).hex() == golden()["call id 258"]
    assert wire.unpack_call_id(wire.pack_call_id(2**64 - 1)) == 2**64 - 1
    assert wire.encode_sentence("Register first.").hex() == golden()["error sentence"]
    assert wire.decode_sentence(wire.encode_sentence("x" * 10_000)) == "x" * wire.MAX_SENTENCE_CHARACTERS
    assert wire.decode_sentence(b"\xc1") == "the server gave no reason"
    assert wire.decode_sentence(b"\xa2\xff\xff") == "the server gave no reason"


def test_error_codes_are_ascii_and_short() -> None:
    for code in m.ErrorCode:
        assert code.value.encode("ascii") != wire.STATUS_OK
        assert len(code.value) <= 32


@pytest.mark.parametrize("name", ADDED)
def test_what_an_older_engine_sends_is_understood(name: str) -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(EXAMPLES[name]))
    older = msgspec.msgpack.encode(fields[: -ADDED[name]])
    assert msgspec.msgpack.decode(older, type=type(EXAMPLES[name])) == EXAMPLES[name]


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_a_newer_engine_sends_is_understood(name: str) -> None:
    """Fields that are not known here are left out."""
    newer = msgspec.msgpack.encode([*msgspec.msgpack.decode(msgspec.msgpack.encode(EXAMPLES[name])), "new"])
    assert msgspec.msgpack.decode(newer, type=type(EXAMPLES[name])) == EXAMPLES[name]
