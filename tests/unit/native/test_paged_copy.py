from __future__ import annotations

import array
import mmap
import random
from collections.abc import Iterator

import pytest

from lmcache import _native
from lmcache.core.frame import frame_bytes, header_template
from lmcache.core.key import Namespace

NAMESPACE = Namespace("model", 1, 0, 0, "0" * 32)
LAYERS, NUM_BLOCKS, BLOCKS_PER_CHUNK, CHUNKS = 3, 24, 4, 6
HEADS, TOKENS, HEAD_BYTES = 2, 4, 64  # a block is HEADS x TOKENS runs of HEAD_BYTES, the heads apart
HEAD_STRIDE = TOKENS * HEAD_BYTES + 128
BLOCK_STRIDE = HEADS * HEAD_STRIDE + 64
BLOCK_CONTENT = HEADS * TOKENS * HEAD_BYTES
PAYLOAD = LAYERS * BLOCKS_PER_CHUNK * BLOCK_CONTENT
FRAME = frame_bytes(PAYLOAD)
HASHES = bytes(range(32)) * CHUNKS
WAIT_SECONDS = 30.0


class Engine:
    """KV memory with gaps, and an arena beside it."""

    def __init__(self) -> None:
        self.layers = [bytearray(random.Random(layer).randbytes(NUM_BLOCKS * BLOCK_STRIDE)) for layer in range(LAYERS)]
        self.arena = mmap.mmap(-1, CHUNKS * FRAME)
        self.address = _native.buffer_address(self.arena)
        self.copier = _native.PagedCopier(self.address, len(self.arena), 2)
        dims = ((HEADS, HEAD_STRIDE), (TOKENS, HEAD_BYTES))
        segments = [(_native.buffer_address(layer), BLOCK_STRIDE, HEAD_BYTES, dims) for layer in self.layers]
        self.group = self.copier.add_group(segments, BLOCKS_PER_CHUNK, NUM_BLOCKS)
        self.template = header_template(NAMESPACE, PAYLOAD)
        self.slots = array.array("Q", (FRAME * i for i in range(CHUNKS)))
        order = list(range(NUM_BLOCKS))
        random.Random(9).shuffle(order)
        self.blocks = array.array("q", order)

    def content(self, layer: int, block: int) -> bytes:
        at = block * BLOCK_STRIDE
        return b"".join(
            bytes(self.layers[layer][at + head * HEAD_STRIDE :][: TOKENS * HEAD_BYTES]) for head in range(HEADS)
        )

    def payload(self, chunk: int) -> bytes:
        ids = self.blocks[chunk * BLOCKS_PER_CHUNK : (chunk + 1) * BLOCKS_PER_CHUNK]
        return b"".join(self.content(layer, block) for layer in range(LAYERS) for block in ids)

    def store(self) -> bytes | None:
        job = self.copier.submit_store(self.group, self.slots, self.blocks, HASHES, self.template)
        return self.copier.wait(job, WAIT_SECONDS)

    def submit_load(self, blocks: array.array[int] | None = None) -> int:
        return self.copier.submit_load(self.group, self.slots, blocks or self.blocks, HASHES, NAMESPACE.digest)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.copier.close()


def test_a_slot_holds_the_documented_frame(engine: Engine) -> None:
    assert engine.copier.payload_bytes(engine.group) == PAYLOAD
    assert engine.store() == b"\x01" * CHUNKS
    for chunk in range(CHUNKS):
        at = chunk * FRAME
        payload = engine.arena[at + 4096 : at + 4096 + PAYLOAD]
        assert payload == engine.payload(chunk)
        sealed = bytearray(engine.arena[at : at + FRAME])
        _native.frame_seal(_native.buffer_address(sealed), engine.template, HASHES[:32])
        assert sealed == engine.arena[at : at + FRAME]


def test_chunks_come_back_and_gaps_stay(engine: Engine) -> None:
    assert engine.store() == b"\x01" * CHUNKS
    before = [bytes(layer) for layer in engine.layers]
    contents = [[engine.content(layer, block) for block in range(NUM_BLOCKS)] for layer in range(LAYERS)]
    for content in engine.layers:
        content[:] = bytes(byte ^ 0xFF for byte in content)
    assert engine.copier.wait(engine.submit_load(), WAIT_SECONDS) == b"\x01" * CHUNKS
    for layer in range(LAYERS):
        assert [engine.content(layer, block) for block in range(NUM_BLOCKS)] == contents[layer]
        for block in range(NUM_BLOCKS):
            gap = slice(block * BLOCK_STRIDE + TOKENS * HEAD_BYTES, block * BLOCK_STRIDE + HEAD_STRIDE)
            assert engine.layers[layer][gap] == bytes(byte ^ 0xFF for byte in before[layer][gap])


def test_a_damaged_chunk_alone_fails(engine: Engine) -> None:
    assert engine.store() == b"\x01" * CHUNKS
    engine.arena[2 * FRAME + 4096 + PAYLOAD - 1] ^= 1
    engine.arena[4 * FRAME + 50] ^= 1
    assert engine.copier.wait(engine.submit_load(), WAIT_SECONDS) == b"\x01\x01\x00\x01\x00\x01"
    nowhere = array.array("q", [-1]) * len(engine.blocks)
    assert engine.copier.wait(engine.submit_load(nowhere), WAIT_SECONDS) == b"\x01\x01\x00\x01\x00\x01"


def test_results_are_given_once(engine: Engine) -> None:
    assert engine.store() == b"\x01" * CHUNKS
    jobs = [engine.submit_load() for _ in range(3)]
    for job in jobs:
        assert engine.copier.wait(job, WAIT_SECONDS) == b"\x01" * CHUNKS
    with pytest.raises(ValueError, match="unknown or was collected"):
        engine.copier.wait(jobs[0], 0)


def test_what_is_refused(engine: Engine) -> None:
    copier, digest = engine.copier, NAMESPACE.digest
    hashes, blocks = bytes(32), array.array("q", range(BLOCKS_PER_CHUNK))
    with pytest.raises(ValueError, match="leaves the arena"):
        copier.submit_load(engine.group, array.array("Q", [CHUNKS * FRAME]), blocks, hashes, digest)
    with pytest.raises(ValueError, match="block id 24 is outside"):
        copier.submit_load(engine.group, array.array("Q", [0]), array.array("q", [0, 1, 2, 24]), hashes, digest)
    with pytest.raises(ValueError, match="block id -1 is outside 0"):
        copier.submit_store(engine.group, bytes(8), array.array("q", [0, 1, 2, -1]), hashes, engine.template)
    with pytest.raises(ValueError, match="blocks must hold a whole number of 8-byte elements"):
        copier.submit_load(engine.group, bytes(8), bytes(31), hashes, digest)
    with pytest.raises(ValueError, match="the template is for payloads of 4096 bytes"):
        copier.submit_store(engine.group, bytes(8), blocks, hashes, header_template(NAMESPACE, 4096))
    with pytest.raises(ValueError, match="threads must be 1 to 64"):
        _native.PagedCopier(engine.address, len(engine.arena), 0)
    with pytest.raises(ValueError, match="count must be at least 1"):
        copier.add_group([(engine.address, 64, 64, ((0, 64),))], 1, 1)
    copier.close()
    with pytest.raises(ValueError, match="closed"):
        engine.submit_load()
