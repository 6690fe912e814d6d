"""What names an object: a namespace and a chunk hash."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import NamedTuple

import msgspec

CHUNK_HASH_BYTES = 32
NAMESPACE_DIGEST_BYTES = 32
MAX_NAMESPACE_BYTES = 2048


class Namespace(msgspec.Struct, frozen=True, cache_hash=True, dict=True):
    """Everything that must match, apart from the tokens, before KV bytes may be shared.

    `world_size` and `rank` count the workers that hold *different* KV: tensor-parallel ranks of an MLA model all are
    rank 0 of 1. `layout` is `KVLayout.fingerprint`, 32 hex digits. `cache_salt` separates tenants; "" is the default.
    A struct of msgspec for its hash, which is computed once and in C: keys are looked up by the thousand.
    """

    model_name: str
    world_size: int
    rank: int
    object_group: int
    layout: str
    cache_salt: str = ""

    def encode(self) -> bytes:
        """Canonical bytes: a msgpack array of the fields in declaration order. Stored in every frame header."""
        return msgspec.msgpack.encode(
            (self.model_name, self.world_size, self.rank, self.object_group, self.layout, self.cache_salt)
        )

    @classmethod
    def decode(cls, encoded: bytes) -> Namespace:
        model_name, world_size, rank, object_group, layout, cache_salt = msgspec.msgpack.decode(
            encoded, type=tuple[str, int, int, int, str, str]
        )
        return cls(model_name, world_size, rank, object_group, layout, cache_salt)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of `encode()`, 32 bytes: what frame headers and file names carry."""
        return hashlib.sha256(self.encode()).digest()


def salt_digest(cache_salt: str) -> str:
    """What stands for a cache salt where it is not to be read: the same on every server. "" stays what it is."""
    return f"salt-{hashlib.sha256(cache_salt.encode()).hexdigest()[:12]}" if cache_salt else ""


class ObjectKey(NamedTuple):
    """Names one object on any tier. `chunk_hash` is 32 bytes and stands for the chunk and all tokens before it."""

    namespace: Namespace
    chunk_hash: bytes
