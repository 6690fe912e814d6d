"""Who a peer is, and whether what it holds can be used here: servers share objects where they name chunks alike."""

from __future__ import annotations

import msgspec

from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.core.limits import MAX_PEER_TEXT_BYTES, SERVER_EPOCH_BYTES
from lmcache.errors import ProtocolError

FRAME_VERSION = 1  # docs/formats/frame.md


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """`hasher_sample` is the name of a fixed chunk, which depends on all that names chunks. `shm_path` and `shm_bytes`
    tell where its L1 is for those on the same host; "" where it does not say so. `transfer_engine`: the library by
    which others can read from its L1; "" for none."""

    epoch: bytes
    address: str
    chunk_tokens: int
    hash_algorithm: str
    hasher_sample: bytes
    frame_version: int = FRAME_VERSION
    shm_path: str = ""
    shm_bytes: int = 0
    transfer_engine: str = ""

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, packed: bytes) -> Identity:
        """ProtocolError."""
        try:
            identity = msgspec.msgpack.decode(packed, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"it introduced itself in a way that breaks the protocol ({error})") from None
        lengths = len(identity.epoch), len(identity.hasher_sample)
        texts = identity.address, identity.hash_algorithm, identity.shm_path, identity.transfer_engine
        if lengths != (SERVER_EPOCH_BYTES, CHUNK_HASH_BYTES) or max(map(len, texts)) > MAX_PEER_TEXT_BYTES:
            raise ProtocolError("it introduced itself with fields of other lengths than the protocol has")
        if not 0 <= identity.shm_bytes < 1 << 63:
            raise ProtocolError("it introduced itself with a size of memory that there cannot be")
        return identity


def why_unfit(ours: Identity, theirs: Identity) -> str:
    """Why neither can use what the other holds, "" where they can. Reads the same on both sides."""
    pairs = sorted((ours, theirs), key=lambda identity: identity.epoch)
    if ours.chunk_tokens != theirs.chunk_tokens:
        sizes = " and ".join(str(identity.chunk_tokens) for identity in pairs)
        return f"the servers have --chunk-size {sizes}: give both the same"
    if ours.hash_algorithm != theirs.hash_algorithm:
        names = " and ".join(identity.hash_algorithm for identity in pairs)
        return f"the servers have --hash-algorithm {names}: give both the same"
    if ours.hasher_sample != theirs.hasher_sample:
        return (
            f"the servers name chunks differently, although both have --hash-algorithm {ours.hash_algorithm}: builtin "
            "needs the same PYTHONHASHSEED on both"
        )
    if ours.frame_version != theirs.frame_version:
        return "the servers store frames of different versions: run the same version of lmcache on both"
    return ""
