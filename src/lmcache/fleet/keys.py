"""Keys of objects as a fleet names them, packed for the native directory.

A scope is what a chunk hash is told apart by: model, rank, object group, salt. Its variants are digests of whole
namespaces, which say the layout as well; a server that does not tell them has the empty one.
"""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from lmcache.core.chunking import ChunkHasher
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.core.key_batch import ChunkHashes
from lmcache.core.limits import MAX_HTTP_KEYS
from lmcache.errors import ConfigError
from lmcache.fleet.messages import SIZE_BYTES, Entry, Key, Objects
from lmcache.protocol.tokens import pack_tokens

Scope = tuple[str, int, int, str]


@lru_cache(8192)
def encode_scope(model_name: str, kv_rank: int, object_group_id: int, cache_salt: str) -> bytes:
    """Canonical bytes: a msgpack array of the fields in this order."""
    return msgspec.msgpack.encode((model_name, kv_rank, object_group_id, cache_salt))


@lru_cache(8192)
def decode_scope(encoded: bytes) -> Scope:
    scope: Scope = msgspec.msgpack.decode(encoded, type=Scope)
    return scope


@dataclass(frozen=True)
class PackedKeys:
    """`positions` says for each key where its scope is in `scopes`; `hashes` has 32 bytes a key."""

    scopes: list[bytes]
    positions: array.array[int]
    hashes: bytes

    def __len__(self) -> int:
        return len(self.positions)


def pack(keys: Sequence[Key]) -> PackedKeys:
    """Whatever their namespaces."""
    known: dict[Scope, int] = {}
    positions = array.array(
        "I",
        [
            known.setdefault((key.model_name, key.kv_rank, key.object_group_id, key.cache_salt), len(known))
            for key in keys
        ],
    )
    text = "".join([key.chunk_hash_hex[-2 * CHUNK_HASH_BYTES :] for key in keys])
    return PackedKeys([encode_scope(*scope) for scope in known], positions, bytes.fromhex(text))


def by_namespace(entries: Iterable[Entry], namespace: str) -> list[tuple[bytes, list[Entry]]]:
    """(variant, its entries). `namespace` is that of entries whose key has none."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.key.namespace or namespace, []).append(entry)
    return [(bytes.fromhex(name), some) for name, some in found.items()]


@dataclass(frozen=True)
class Told:
    """Objects of one variant, and 8 bytes of the size of each."""

    variant: bytes
    keys: PackedKeys
    sizes_bytes: array.array[int] | bytes


def told(entries: Iterable[Entry], namespace: str, objects: Objects | None = None) -> Iterator[Told]:
    """What a batch tells of; `namespace` is that of objects without one of their own."""
    for variant, some in by_namespace(entries, namespace):
        sizes_bytes = array.array("Q", [entry.size_bytes for entry in some])
        yield Told(variant, pack([entry.key for entry in some]), sizes_bytes)
    if objects is not None:
        scope = encode_scope(objects.model_name, objects.kv_rank, objects.object_group_id, objects.cache_salt)
        keys = PackedKeys([scope], array.array("I", bytes(4 * len(objects))), objects.hashes)
        yield Told(bytes.fromhex(namespace), keys, objects.sizes_bytes or bytes(SIZE_BYTES * len(objects)))


@dataclass(frozen=True)
class PromptKeys:
    """`keys`: of each full chunk and rank, chunk by chunk. `partials`: of rank 0 and every partial chunk that may be
    behind them, of all the tokens there, of one fewer, and so on."""

    chunks: int
    keys: list[Key]
    partials: Sequence[Key] = ()
    world_size: int = 1


def keys_of_prompt(
    hasher: ChunkHasher, token_ids: Sequence[int], model_name: str, world_size: int, cache_salt: str
) -> PromptKeys:
    """ConfigError beyond MAX_HTTP_KEYS."""
    if not model_name:
        raise ConfigError('The body: "token_ids" needs "model_name".')
    objects = len(token_ids) // hasher.chunk_tokens * world_size
    if objects > MAX_HTTP_KEYS:
        raise ConfigError(
            f'The body: "token_ids" are {objects} objects at {world_size} ranks, and at most {MAX_HTTP_KEYS} are '
            "taken: ask for a shorter prompt."
        )
    tokens, root = pack_tokens(token_ids), hasher.root(b"")
    packed = hasher.extend(root, tokens)
    hashes = [chunk_hash.hex() for chunk_hash in ChunkHashes(packed)]
    return PromptKeys(
        len(hashes),
        [Key(name, model_name, rank, cache_salt=cache_salt) for name in hashes for rank in range(world_size)],
        [Key(name.hex(), model_name, 0, cache_salt=cache_salt) for name in hasher.partials(root, packed, tokens)],
        world_size,
    )
