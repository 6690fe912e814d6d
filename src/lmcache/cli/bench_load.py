"""A client for `lmcache bench server` that calls a server as an engine does, with plain memory for KV tensors."""

from __future__ import annotations

import random
import struct
import time
import uuid
from array import array
from dataclasses import dataclass, field

from lmcache import _native
from lmcache.cli.bench_timing import Region, timed
from lmcache.client.client import Client
from lmcache.core.frame import header_template
from lmcache.core.key import Namespace
from lmcache.core.key_batch import ChunkHashes
from lmcache.errors import LMCacheError, ResourceError
from lmcache.protocol.messages import (
    Append,
    Commit,
    Empty,
    EndSession,
    Lookup,
    LookupReply,
    RegisterInstance,
    RegisterWorker,
    Release,
    Reserve,
    ReserveReply,
)
from lmcache.transport.curve_keys import CurveFiles

CALL_SECONDS = 30.0
_HEARTBEAT_SECONDS = 10.0
_MODEL = "lmcache-bench"


@dataclass
class Times:
    """Wall seconds of each round, by call."""

    append: list[float] = field(default_factory=list)
    reserve: list[float] = field(default_factory=list)
    copy_in: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)
    lookup: list[float] = field(default_factory=list)
    copy_out: list[float] = field(default_factory=list)
    release: list[float] = field(default_factory=list)


class Engine:
    """One registered instance with one worker, whose chunks are `payload_bytes` of a buffer each."""

    def __init__(self, client: Client, chunks: int, payload_bytes: int, copy_threads: int) -> None:
        assert client.hello is not None and client.memory is not None
        self.client = client
        self.chunks = chunks
        self.payload_bytes = payload_bytes
        self.chunk_tokens = client.hello.chunk_tokens
        self.instance_id = f"bench-{uuid.uuid4().hex[:12]}"
        layout = uuid.uuid4().hex  # unique, so that no object of others or of an earlier run is found or replaced
        namespace = Namespace(_MODEL, 1, 0, 0, layout)
        register(client, self.instance_id, namespace, payload_bytes, "lmcache bench")
        self._template = header_template(namespace, payload_bytes)
        self._digest = namespace.digest
        self.source = Region(chunks * payload_bytes)
        self.source.map[:] = random.Random(1).randbytes(1 << 12) * (chunks * payload_bytes // (1 << 12))
        self.target = Region(chunks * payload_bytes)
        memory = client.memory
        memory.map_ahead()
        self._copier = _native.PagedCopier(memory.address, memory.size_bytes, copy_threads)
        self._group_in = self._add_group(self.source)
        self._group_out = self._add_group(self.target)
        self._blocks = struct.pack(f"<{chunks}q", *range(chunks))

    def _add_group(self, region: Region) -> int:
        """Each chunk is one contiguous block of the region."""
        segment = (region.address, self.payload_bytes, self.payload_bytes, ())
        return self._copier.add_group([segment], 1, self.chunks)

    def close(self) -> None:
        self._copier.close()

    def store(self, tokens: bytes, times: Times) -> bytes:
        """Reserves, copies and commits; the chunk hashes. ResourceError if the server has no room for all chunks."""
        request_id = uuid.uuid4().hex
        append = Append(self.instance_id, request_id, "", 0, tokens)
        started = time.perf_counter()
        hashes: bytes = self.client.call("append", append, CALL_SECONDS).hashes
        appended = time.perf_counter()
        reserved: ReserveReply = self.client.call("reserve", Reserve(self.instance_id, 0, "", hashes), CALL_SECONDS)
        granted = time.perf_counter()
        if reserved.chunks_without_room:
            self.client.call(
                "commit", Commit(self.instance_id, 0, reserved.reservation, bytes(self.chunks)), CALL_SECONDS
            )
            raise ResourceError(
                f"The server had no room for {reserved.chunks_without_room} of {self.chunks} chunks: give it a larger "
                "--l1-size-gb or measure with fewer or smaller chunks; under --eviction-policy IsolatedLRU give the "
                "empty cache salt a quota (lmcache quota set _default GB)."
            )
        job = self._copier.submit_store(self._group_in, reserved.slots, self._blocks, hashes, self._template)
        self._finish(job)
        copied = time.perf_counter()
        commit = Commit(self.instance_id, 0, reserved.reservation)
        committed = self.client.call("commit", commit, CALL_SECONDS).committed
        done = time.perf_counter()
        if committed != self.chunks:
            raise LMCacheError(f"The server published {committed} of {self.chunks} chunks that were stored.")
        self.client.call("end_session", EndSession(self.instance_id, request_id), CALL_SECONDS)
        times.append.append(appended - started)
        times.reserve.append(granted - appended)
        times.copy_in.append(copied - granted)
        times.commit.append(done - copied)
        return hashes

    def lookup(self, tokens: bytes, times: Times, *, copy: bool = False) -> LookupReply:
        """Looks up, copies out if `copy`, and releases. LMCacheError if a copy does not verify."""
        request_id = uuid.uuid4().hex
        lookup = Lookup(self.instance_id, request_id, "", 0, tokens)
        started = time.perf_counter()
        found: LookupReply = self.client.call("lookup", lookup, CALL_SECONDS)
        times.lookup.append(time.perf_counter() - started)
        if copy and found.chunks == self.chunks:
            hashes = ChunkHashes(found.hashes)[: found.chunks].packed
            started = time.perf_counter()
            self._finish(self._copier.submit_load(self._group_out, found.slots, self._blocks, hashes, self._digest))
            times.copy_out.append(time.perf_counter() - started)
        if found.lease:
            release = Release(self.instance_id, found.lease)
            times.release.append(timed(lambda: self.client.call("release", release, CALL_SECONDS)))
        self.client.call("end_session", EndSession(self.instance_id, request_id), CALL_SECONDS)
        return found

    def no_op(self) -> float:
        return timed(lambda: self.client.call("noop", Empty(), CALL_SECONDS))

    def came_back_the_same(self) -> bool:
        return bytes(self.target.map) == bytes(self.source.map)

    def tokens(self, seed: int) -> bytes:
        """Packed tokens (u32) of `chunks` full chunks."""
        return packed_tokens(seed, self.chunks * self.chunk_tokens)

    def _finish(self, job: int) -> None:
        copied = self._copier.wait(job, CALL_SECONDS)
        if copied is None or copied != b"\1" * self.chunks:
            raise LMCacheError("A copy between the bench and L1 failed or did not verify.")


def register(client: Client, instance_id: str, namespace: Namespace, payload_bytes: int, engine: str) -> None:
    """An instance with one worker, whose chunks are all in that namespace."""
    client.register(
        RegisterInstance(instance_id, namespace.model_name, 1, 1, _HEARTBEAT_SECONDS, engine),
        CALL_SECONDS,
    )
    tensors = [("uint8", [payload_bytes])]
    client.register(
        RegisterWorker(instance_id, 0, 0, [namespace.layout], [payload_bytes], tensors=tensors),
        CALL_SECONDS,
    )


def packed_tokens(seed: int, count: int) -> bytes:
    source = random.Random(seed)
    return array("I", (source.getrandbits(17) for _ in range(count))).tobytes()


def lookups_in_a_row(
    url: str, instance_id: str, tokens: bytes, seconds: float, start_at: float, curve: CurveFiles | None
) -> int:
    """The work of one client process: how many lookups it made in that time."""
    client = Client(url, map_memory=False, curve=curve)
    try:
        client.connect(CALL_SECONDS)
        time.sleep(max(0.0, start_at - time.time()))
        deadline = time.perf_counter() + seconds
        count = 0
        while time.perf_counter() < deadline:
            request_id = f"{uuid.uuid4().hex}"
            found = client.call("lookup", Lookup(instance_id, request_id, "", 0, tokens), CALL_SECONDS)
            if found.lease:
                client.call("release", Release(instance_id, found.lease), CALL_SECONDS)
            client.call("end_session", EndSession(instance_id, request_id), CALL_SECONDS)
            count += 1
        return count
    finally:
        client.close()
