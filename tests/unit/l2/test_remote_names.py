"""Names in remote backends are pinned by a golden file; what is not such a name is nobody's object."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from lmcache.core.key import Namespace, ObjectKey
from lmcache.l2.adapters.remote_names import Prefix, RemoteNames, identify_namespace
from lmcache.testing.frames import FrameMemory, keys, namespace

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "remote_names_v1.json").read_text())


def golden_key(vector: dict[str, object]) -> ObjectKey:
    return ObjectKey(Namespace(*vector["namespace"]), bytes.fromhex(str(vector["chunk_hash"])))


@pytest.mark.parametrize("vector", GOLDEN["objects"], ids=lambda vector: vector["prefix"])
def test_names_are_those_of_the_golden_file(vector: dict[str, object]) -> None:
    names, key = RemoteNames(str(vector["prefix"])), golden_key(vector)
    assert names.names([key]) == [vector["name"]]
    assert names.parse(str(vector["name"])) == (key.namespace.digest, key.chunk_hash)
    assert str(vector["name"]).startswith(names.folder(key.namespace.digest))


@pytest.mark.parametrize("name", GOLDEN["foreign"])
def test_other_names_are_not_ours(name: str) -> None:
    assert RemoteNames("lmcache").parse(name) is None


def test_every_part_of_a_key_counts() -> None:
    first, other = keys(2)
    names = RemoteNames().names([first, other, ObjectKey(namespace(salt="b"), first.chunk_hash)])
    assert len(set(names)) == 3
    assert [RemoteNames().parse(name) for name in names[:2]] == [
        (key.namespace.digest, key.chunk_hash) for key in (first, other)
    ]


def test_a_header_tells_its_namespace_and_nothing_else_does() -> None:
    key = keys(1, of=namespace("a model", salt="tenant"))[0]
    frame = FrameMemory(1).fill(0, key)
    assert identify_namespace(frame[:4096], key.namespace.digest) == key.namespace
    assert identify_namespace(bytes(frame), key.namespace.digest) == key.namespace
    assert identify_namespace(frame[:4096], bytes(32)) is None
    assert identify_namespace(frame[:4095], key.namespace.digest) is None
    assert identify_namespace(bytes(4096), key.namespace.digest) is None
    assert identify_namespace(b"", key.namespace.digest) is None


@pytest.mark.parametrize("prefix", ["lmcache", "a", "team-1/kv.cache:prod_2", "x" * 128])
def test_a_prefix_is_accepted(prefix: str) -> None:
    assert msgspec.convert(prefix, Prefix) == prefix


@pytest.mark.parametrize("prefix", ["", "/a", "a/", "a b", "a*", "{a}", "a\n", "\u00e9", "x" * 129, "a?b", "a#b", "-"])
def test_a_prefix_that_names_could_not_carry_is_refused(prefix: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(prefix, Prefix)
