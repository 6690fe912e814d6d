"""Whatever arrives, a decoder makes a message within the limits or one error of it."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from lmcache.core import limits
from lmcache.protocol import messages as m
from lmcache.transport import wire

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "wire_v1.json").read_text())
TYPES = sorted({kind for pair in m.METHODS.values() for kind in pair}, key=lambda kind: kind.__name__)
BOUNDED = (inspect.StrType, inspect.BytesType, inspect.ByteArrayType, inspect.MemoryViewType, inspect.ListType)


def kinds_of(kind: inspect.Type) -> list[inspect.Type]:
    """The type and all inside it."""
    inner = [kind.item_type] if isinstance(kind, inspect.ListType) else []
    inner += list(kind.item_types) if isinstance(kind, inspect.TupleType) else []
    inner += list(kind.types) if isinstance(kind, inspect.UnionType) else []
    inner += [each.type for each in kind.fields] if isinstance(kind, inspect.StructType) else []
    return [kind] + [deeper for each in inner for deeper in kinds_of(each)]


def fields_of(message_type: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    kind = inspect.type_info(message_type)
    assert isinstance(kind, inspect.StructType)
    return kind.fields


@pytest.mark.parametrize("message_type", TYPES, ids=lambda kind: kind.__name__)
def test_every_field_that_could_be_long_has_a_limit(message_type: Any) -> None:
    numbers = (inspect.IntType, inspect.FloatType, inspect.BoolType)
    nested = (inspect.TupleType, inspect.UnionType, inspect.StructType, inspect.NoneType)
    known = (*BOUNDED, *numbers, *nested)
    for field in fields_of(message_type):
        for kind in kinds_of(field.type):
            assert isinstance(kind, known), f"{field.name}: {kind}"
            if isinstance(kind, BOUNDED):
                assert kind.max_length is not None, field.name
                assert kind.max_length <= limits.MAX_MESSAGE_BYTES


@pytest.mark.parametrize("method", m.METHODS)
def test_the_largest_message_of_each_method_fits(method: Any) -> None:
    for message_type in m.METHODS[method]:
        largest = [of_full_length(field.type) for field in fields_of(message_type)]
        payload = msgspec.msgpack.encode(largest)
        assert len(payload) + 1024 < limits.MAX_MESSAGE_BYTES
        wire.decoder_of(message_type).decode(payload)


def of_full_length(kind: Any) -> Any:
    if isinstance(kind, inspect.ListType):
        return [of_full_length(kind.item_type)] * (kind.max_length or 0)
    if isinstance(kind, inspect.TupleType):
        return [of_full_length(each) for each in kind.item_types]
    if isinstance(kind, inspect.UnionType):
        return of_full_length(next(each for each in kind.types if not isinstance(each, inspect.NoneType)))
    if isinstance(kind, inspect.StructType):
        return [of_full_length(each.type) for each in kind.fields]
    if isinstance(kind, inspect.StrType):
        return "x" * (kind.max_length or 0)
    if isinstance(kind, BOUNDED):
        return bytes(kind.max_length or 0)
    return 1.5 if isinstance(kind, inspect.FloatType) else isinstance(kind, inspect.BoolType) or (1 << 62)


def test_a_list_beyond_its_limit_is_refused_before_anything_is_made_of_it() -> None:
    payload = msgspec.msgpack.encode(["engine", 1, [1 << 40] * 2_000_000])
    decoder = wire.decoder_of(m.Release)
    tracemalloc.start()
    try:
        with pytest.raises(msgspec.ValidationError, match="length <= 16384"):
            decoder.decode(payload)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "make",
    [
        lambda process: m.RegisterInstance("i", "model", 1, 1, 10.0, process=process),
        lambda process: m.RegisterWorker("engine", 1, 0, ["5e" * 16], [4096], process=process),
    ],
)
def test_a_process_id_beyond_its_limit_is_refused(make: Any) -> None:
    whole, long = make(bytes(limits.PROCESS_ID_BYTES)), make(bytes(limits.PROCESS_ID_BYTES + 1))
    assert wire.decoder_of(type(whole)).decode(msgspec.msgpack.encode(whole)) == whole
    with pytest.raises(msgspec.ValidationError, match=f"length <= {limits.PROCESS_ID_BYTES}"):
        wire.decoder_of(type(long)).decode(msgspec.msgpack.encode(long))


@settings(max_examples=600)
@given(
    name=st.sampled_from([kind.__name__ for kind in TYPES]),
    damage=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=5),
    cut=st.integers(0, 400),
    added=st.binary(max_size=20),
)
def test_damaged_payloads_are_decoded_within_limits_or_refused(name: str, damage: Any, cut: int, added: bytes) -> None:
    payload = bytearray.fromhex(GOLDEN[name])
    for at, value in damage:
        payload[at % len(payload)] = value
    decode(name, bytes(payload))
    decode(name, bytes(payload[:cut]) + added)


@settings(max_examples=300)
@given(name=st.sampled_from([kind.__name__ for kind in TYPES]), payload=st.binary(max_size=200))
def test_random_payloads_are_decoded_within_limits_or_refused(name: str, payload: Any) -> None:
    decode(name, payload)
    decode(name, b"\xdc\x00\x09" + payload)


def decode(name: str, payload: bytes) -> None:
    message_type = getattr(m, name)
    try:
        message = wire.decoder_of(message_type).decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # what the message loop refuses
        return
    for field in fields_of(message_type):
        if isinstance(field.type, BOUNDED):
            assert len(getattr(message, field.name)) <= (field.type.max_length or 0)
    wire.encode_payload(message)
