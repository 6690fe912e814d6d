"""The part of `_native` that encodes and decodes; `_native.pyi` takes it in, there is no module of this name."""

from collections.abc import Sequence
from typing import Any

from lmcache._native import Buffer

class SerdeStage:
    """Turns a payload into another one and back (docs/formats/serde.md). Thread-safe, without the GIL."""

    def max_encoded_bytes(self, source_bytes: int) -> int: ...
    def encode(self, source: Buffer, destination: Buffer) -> tuple[int, bytes] | None:
        """Bytes written, and parameters for `decode`; None: there is nothing to gain. Without a key: for tests and
        benchmarks."""
    def decode(self, source: Buffer, destination: Buffer, parameters: bytes) -> str:
        """Fills `destination`, which has the size of what was encoded. "", "corrupt", "unreadable" or "failed"."""

def exponent_stage(smallest_saving: float, path: str = "") -> SerdeStage:
    """`path`: "portable", "avx2", "avx512" or "" for the best."""

def zstd_refusal() -> str:
    """ "" or why libzstd.so.1 cannot be used."""

def zstd_stage(level: int, smallest_saving: float) -> SerdeStage:
    """RuntimeError where `zstd_refusal` says why."""

def crypto_refusal() -> str:
    """ "" or why libcrypto cannot be used."""

class ObjectCipher:
    def __init__(self, keys: Sequence[bytes], aes_bits: int) -> None:
        """1 to 16 master keys of 32 bytes: the first one seals, all of them open."""
    def replace_keys(self, keys: Sequence[bytes]) -> None: ...

def aesgcm_stage(cipher: ObjectCipher) -> SerdeStage: ...
def python_stage(stage: Any) -> SerdeStage:
    """Calls `max_encoded_bytes(source_bytes) -> int`, `encode(source, destination, namespace, chunk_hash) -> int|None`
    and `decode(source, destination, namespace, chunk_hash) -> bool`, with memoryviews that end with the call."""

class SerdeChain:
    def __init__(self, name: str, stages: Sequence[SerdeStage]) -> None: ...
    def max_frame_bytes(self, served_frame_bytes: int) -> int:
        """Memory that it takes to encode a frame of that size."""

class SerdeQueue:
    """Encodes and decodes whole frames on threads of its own, of low priority."""

    def __init__(self, chain: SerdeChain, threads: int) -> None: ...
    def event_fd(self) -> int: ...
    def submit(
        self,
        encodes: bool,
        sources: Sequence[memoryview],
        destinations: Sequence[memoryview],
        hashes: Buffer,
        templates: Buffer,
        positions: Buffer,
    ) -> int:
        """Returns a job number. `templates` are those of a served and its stored namespace, in turn, without a payload
        size; `positions` (u32) says which belongs to each frame. Memory must stay until the job is drained."""
    def drain(self) -> list[tuple[int, memoryview, bytes]]:
        """(job, bytes of each frame written (u64) or 0, fault of each: 0 none, 1 corrupt, 2 unreadable, 3 failed)"""
    def close(self) -> None:
        """Waits for everything submitted. Idempotent."""
