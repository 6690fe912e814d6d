from __future__ import annotations

import hashlib
import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import blake3
import cbor2
import pytest

from lmcache.core import chunk_links
from lmcache.core.chunking import ALGORITHMS, ChunkHasher
from lmcache.core.limits import MAX_NAMED_PARTIALS
from lmcache.errors import ConfigError

PARENT = bytes(range(32))


def pack(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def some_tokens(count: int, seed: int = 1) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(1 << 32) for _ in range(count)]


def blake3_chain(parent: bytes, tokens: bytes, chunk_tokens: int, extras: dict[int, bytes]) -> bytes:
    """The formula of docs/formats/chunk_hash.md, by another implementation of BLAKE3."""
    hashes = []
    step = 4 * chunk_tokens
    for chunk in range(len(tokens) // step):
        digest = blake3.blake3(tokens[chunk * step : (chunk + 1) * step]).digest()
        parent = blake3.blake3(parent + digest + extras.get(chunk, b"")).digest()
        hashes.append(parent)
    return b"".join(hashes)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 64, 256, 257, 512, 1000])
@pytest.mark.parametrize("chunks", [0, 1, 3, 4, 7, 8, 9, 16, 29])
def test_blake3_chain_is_the_documented_one(chunk_tokens: int, chunks: int) -> None:
    tokens = pack(some_tokens(chunk_tokens * chunks + chunk_tokens // 2))
    extras = {chunk: bytes([chunk + 1]) * 32 for chunk in range(0, chunks, 3)}
    hasher = ChunkHasher("blake3", chunk_tokens)
    assert hasher.extend(PARENT, tokens) == blake3_chain(PARENT, tokens, chunk_tokens, {})
    assert hasher.extend(PARENT, tokens, extras) == blake3_chain(PARENT, tokens, chunk_tokens, extras)


def test_sha256_cbor_chain_is_the_documented_one() -> None:
    tokens = some_tokens(40)
    first = hashlib.sha256(cbor2.dumps((PARENT, tokens[:16], None))).digest()
    second = hashlib.sha256(cbor2.dumps((first, tokens[16:32], b"x" * 32))).digest()
    assert ChunkHasher("sha256_cbor", 16).extend(PARENT, pack(tokens), {1: b"x" * 32}) == first + second


@pytest.mark.parametrize("chunk_tokens", [1, 23, 24, 255, 256, 65_536])
@pytest.mark.parametrize("extra", [b"", b"e" * 32])
def test_sha256_cbor_of_all_sizes_of_numbers(chunk_tokens: int, extra: bytes) -> None:
    limits = (0, 23, 24, 255, 256, 65_535, 65_536, (1 << 32) - 1)
    tokens = [limits[number % len(limits)] for number in range(chunk_tokens)]
    expected = hashlib.sha256(cbor2.dumps((PARENT, tokens, extra or None))).digest()
    assert (
        ChunkHasher("sha256_cbor", chunk_tokens).extend(PARENT, pack(tokens), {0: extra} if extra else {}) == expected
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_extending_in_steps_equals_extending_at_once(algorithm: str) -> None:
    hasher = ChunkHasher(algorithm, 16)
    tokens = memoryview(pack(some_tokens(16 * 20)))
    root = hasher.root(b"model")
    at_once = hasher.extend(root, tokens)
    first = hasher.extend(root, tokens[: 16 * 4 * 7])
    assert first + hasher.extend(first[-32:], tokens[16 * 4 * 7 :]) == at_once
    assert len(at_once) == 20 * 32


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_hash_depends_on_everything_before_it(algorithm: str) -> None:
    hasher = ChunkHasher(algorithm, 16)
    tokens = some_tokens(48)
    plain = hasher.extend(hasher.root(b""), pack(tokens))
    changed = hasher.extend(hasher.root(b""), pack([*tokens[:17], tokens[17] ^ 1, *tokens[18:]]))
    with_extra = hasher.extend(hasher.root(b""), pack(tokens), {1: b"i" * 32})
    assert plain[:32] == changed[:32] == with_extra[:32]
    for start in (32, 64):
        assert len({each[start : start + 32] for each in (plain, changed, with_extra)}) == 3
    assert hasher.extend(hasher.root(b""), pack(tokens), {1: bytes(32)}) == plain


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_roots_differ_by_identity_algorithm_and_chunk_size(algorithm: str) -> None:
    root = ChunkHasher(algorithm, 16).root(b"a")
    others = [ChunkHasher(algorithm, 16).root(b"b"), ChunkHasher(algorithm, 32).root(b"a")]
    others += [ChunkHasher(other, 16).root(b"a") for other in ALGORITHMS if other != algorithm]
    assert len(root) == 32
    assert root not in others


def test_golden_hashes() -> None:
    """Stored objects are found by these; a change of any makes every cache on disk unreachable."""
    hasher = ChunkHasher("blake3", 256)
    root = hasher.root(b"golden")
    hashes = hasher.extend(root, pack(list(range(512))), {1: b"e" * 32})
    assert root.hex() == "49f60e74dad19894f0720a1c71cb16b98364d3c26c14077ce05206982dd58c0a"
    assert hashes[:32].hex() == "9bfecdaafd3a76e681d051ee6c86853bcf316f300706826f5614ab97355e7012"
    assert hashes[32:].hex() == "9acd0b602ccd77f4c41ab3ffa5aa83ff64c40e016abcbd065582e84c98414694"
    with_sha = ChunkHasher("sha256_cbor", 256).extend(root, pack(list(range(256))))
    assert with_sha.hex() == "e8c3697cc6de5f77f8649e7c1ffb3f15e59be4ff58b6bf6b95490c2702dbd71f"


@pytest.mark.parametrize("algorithm", ["blake3", "sha256_cbor"])
def test_hashes_do_not_depend_on_the_interpreters_seed(algorithm: str) -> None:
    program = (
        "import sys; from lmcache.core.chunking import ChunkHasher;"
        f"print(ChunkHasher({algorithm!r}, 4).extend(bytes(32), bytes(range(64)), {{1: b'x' * 32}}).hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


BUILTIN_PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("links", {path!r})
links = importlib.util.module_from_spec(spec)
spec.loader.exec_module(links)
first = links.builtin(bytes(range(32)), bytes(range(64)), b"")
print(sys.hash_info.algorithm, (first + links.builtin(first, bytes(range(64)), b"x" * 32)).hex())
"""
BUILTIN_HASHES = {
    "siphash24": "69a9a67c51188facefa636e19d63af125c43cefcd53d953884cf5a0ee4b15dfb"
    "2bef51c35e39683df6ebb66e3edb23154a985afeaebf360c8dc61b11f9a9ebce",
    "siphash13": "df0411c9811d61399cea82c94e134062b1c68cd7752945649aa2ef7469f90ac6"
    "f817c3b97f40decd6dd12599b594292f85eb26c896d97f9db1f18eacf0fdf569",
}
INTERPRETERS = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"


def python_of(minor: int) -> str:
    """An interpreter of that version; "" where this machine has none that runs: what pyenv puts into the path does so
    only where its version is selected."""
    named = [sys.executable] if sys.version_info[:2] == (3, minor) else []
    named += filter(None, [shutil.which(f"python3.{minor}")])
    named += map(str, sorted(INTERPRETERS.glob(f"3.{minor}.*/bin/python3.{minor}")))
    runs = (python for python in named if not subprocess.run([python, "-c", ""], capture_output=True).returncode)
    return next(runs, "")


@pytest.mark.parametrize("minor", range(10, 14))
def test_builtin_with_a_fixed_seed_is_the_same_in_every_process(minor: int) -> None:
    """Each process has its memory at other addresses."""
    python = python_of(minor)
    if not python:
        pytest.skip(f"this machine has no Python 3.{minor}")
    program = BUILTIN_PROGRAM.format(path=chunk_links.__file__)
    for _ in range(2):
        output = subprocess.run(
            [python, "-c", program], env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True
        ).stdout.split()
        assert output[1] == BUILTIN_HASHES[output[0]]


@pytest.mark.parametrize("changed", ["parent", "tokens", "extra", "no extra"])
def test_each_quarter_of_a_builtin_hash_depends_on_everything(changed: str) -> None:
    """A collision of one 64-bit hash must not be one of all four."""
    parts = {"parent": PARENT, "tokens": bytes(64), "extra": b"x" * 32}
    other = (
        {**parts, "extra": b""}
        if changed == "no extra"
        else {**parts, changed: bytes(reversed(b"y" + parts[changed][1:]))}
    )
    first, second = chunk_links.builtin(*parts.values()), chunk_links.builtin(*other.values())
    assert all(first[start : start + 8] != second[start : start + 8] for start in range(0, 32, 8))


def test_partial_chunks_of_a_long_rest_are_not_named() -> None:
    hasher = ChunkHasher("blake3", MAX_NAMED_PARTIALS + 2)
    assert len(hasher.partials(PARENT, b"", bytes(4 * MAX_NAMED_PARTIALS))) == MAX_NAMED_PARTIALS
    assert hasher.partials(PARENT, b"", bytes(4 * (MAX_NAMED_PARTIALS + 1))) == []


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="'md5' is unknown: use one of blake3, builtin, sha256_cbor"):
        ChunkHasher("md5", 256)
    with pytest.raises(ConfigError, match="at least 1"):
        ChunkHasher("blake3", 0)
    for algorithm in ALGORITHMS:
        hasher = ChunkHasher(algorithm, 4)
        with pytest.raises(ValueError, match="parent must be 32 bytes"):
            hasher.extend(b"short", bytes(16))
        with pytest.raises(ValueError, match="the extra of chunk 1"):
            hasher.extend(PARENT, bytes(16), {1: b"x" * 32})
        with pytest.raises(ValueError, match="the extra of chunk 0"):
            hasher.extend(PARENT, bytes(16), {0: b"x"})
