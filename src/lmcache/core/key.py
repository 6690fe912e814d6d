"""What names an object: a namespace and a chunk hash."""

from __future__ import annotations

import hashlib
import re
from functools import cached_property
from typing import NamedTuple

import msgspec

CHUNK_HASH_BYTES = 32
DEFAULT_SALT = "_default"  # names the empty cache salt, in files, paths and logs
MAX_NAMESPACE_BYTES = 2048
_UNNAMED = b"\xc0"  # msgpack's nil: no named namespace is encoded so


class Namespace(msgspec.Struct, frozen=True, cache_hash=True, dict=True):
    """Everything that must match, apart from the tokens, before KV bytes may be shared.

    `world_size` and `rank` count the workers that hold *different* KV: tensor-parallel ranks of an MLA model all are
    rank 0 of 1. `layout` is `KVLayout.fingerprint`, 32 hex digits, and what the marks below add. `cache_salt` separates
    tenants; "" is the default.
    A msgspec struct because its hash is computed once, in C: keys are looked up by the thousand.
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


class UnnamedNamespace(Namespace, frozen=True, cache_hash=True, dict=True):
    """Stands for a namespace of which only the digest is known. No request asks for its objects."""

    @classmethod
    def of(cls, digest: bytes) -> UnnamedNamespace:
        return cls(digest.hex(), world_size=0, rank=0, object_group=0, layout="")

    def encode(self) -> bytes:
        """For the ledger alone; `decode_known` reads it."""
        return _UNNAMED + self.digest

    @cached_property
    def digest(self) -> bytes:
        return bytes.fromhex(self.model_name)


def decode_known(encoded: bytes) -> Namespace:
    """Decodes a namespace of either kind."""
    return UnnamedNamespace.of(encoded[1:]) if encoded.startswith(_UNNAMED) else Namespace.decode(encoded)


# In a layout, behind its fingerprint: the lossy serde whose outcome requests accept, then, of an encoded object on a
# tier, the serde that wrote it.
LOSSY_MARK, SERDE_MARK = "~", "+"
MAX_SERDE_NAME_CHARACTERS = 32  # what a frame's header has room for
# That a serde adds to an encoded namespace: mark, name, and a longer length of the layout.
MAX_SERDE_MARK_BYTES = 1 + MAX_SERDE_NAME_CHARACTERS + 2
SERDE_NAME = re.compile(rf"[a-z0-9][a-z0-9._-]{{0,{MAX_SERDE_NAME_CHARACTERS - 1}}}")
_SERVED_LAYOUT = re.compile(rf"[0-9a-f]{{32}}({LOSSY_MARK}{SERDE_NAME.pattern})?")


def is_served_layout(layout: str) -> bool:
    """Whether an engine may call a layout so."""
    return _SERVED_LAYOUT.fullmatch(layout) is not None


def accepting_layout(fingerprint: str, lossy_serde: str) -> str:
    """The layout of requests that accept what `lossy_serde` makes of objects; "" for none but exact ones."""
    return f"{fingerprint}{LOSSY_MARK}{lossy_serde}" if lossy_serde else fingerprint


def accepted_lossy_serde(layout: str) -> str:
    """The lossy serde through which what is served may have gone; "" where it must be exact."""
    return layout.partition(SERDE_MARK)[0].partition(LOSSY_MARK)[2]


def stored_serde(namespace: Namespace) -> str:
    """The serde that wrote the objects of a namespace on a tier; "" where they are as they are served."""
    return namespace.layout.partition(SERDE_MARK)[2]


class SaltDigest:
    """Replaces cache salts where they must not be shown. Who lacks the key cannot tell whether a salt that he guesses
    is among them."""

    KEY_BYTES = 16

    def __init__(self, key: bytes) -> None:
        self._key = key

    def __call__(self, cache_salt: str) -> str:
        """ "" stays ""."""
        if not cache_salt:
            return ""
        name = cache_salt.encode(errors="surrogatepass")
        return f"salt-{hashlib.blake2b(name, key=self._key, digest_size=6).hexdigest()}"


class ObjectKey(NamedTuple):
    """Names one object on any tier. `chunk_hash` is 32 bytes and stands for the chunk and all tokens before it."""

    namespace: Namespace
    chunk_hash: bytes
