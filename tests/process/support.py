"""A small engine for tests of real servers: registers, fills slots with real frames, reads them back."""

from __future__ import annotations

import hashlib
import struct
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from lmcache import _native
from lmcache.client import Client
from lmcache.client.socket_frames import Frame, FrameMover
from lmcache.client.transfer_mode import WantedTransfer
from lmcache.config.load import Loaded
from lmcache.config.spec import ServerConfig
from lmcache.core.chunking import TOKEN_BYTES
from lmcache.core.frame import header_template, verify_frames
from lmcache.core.key import CHUNK_HASH_BYTES, Namespace, ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.environment import SYSTEM, Environment
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.protocol import messages as m
from lmcache.protocol.tokens import pack_tokens
from lmcache.server import Server
from lmcache.startup import Plan
from lmcache.testing.processes import CacheServer, free_port
from lmcache.tiering.policy_selection import select_prefetch_policy, select_store_policy
from lmcache.transport.curve_keys import CurveFiles
from polling import until

LAYOUT = "5e" * 16
CALL_SECONDS = 20.0
NO_SLOT = 2**64 - 1


@contextmanager
def server_within(environment: Environment = SYSTEM, **settings: Any) -> Iterator[Server]:
    """A small server inside this process, for tests that reach into it."""
    defaults = {"l1_size_gb": 0.05, "eviction_policy": "LRU", "port": 0, "http_port": free_port(), "prometheus_port": 0}
    config = ServerConfig(host="127.0.0.1", http_host="127.0.0.1", **{**defaults, **settings})
    adapters = [build(parse_adapter(spec, index)) for index, spec in enumerate(config.l2_adapter)]
    policies = select_store_policy(config.l2_store_policy), select_prefetch_policy(config.l2_prefetch_policy)
    server = Server(Plan(Loaded(config, {}, frozenset()), adapters, *policies, notes=()), environment)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def checked_server(folder: Path, l1_size_gb: float) -> Iterator[CacheServer]:
    """A server as a process. Unless the test ended it, at the end nothing is held, nothing went wrong in its log, and
    it stops with code 0."""
    with CacheServer(folder, l1_size_gb=l1_size_gb) as server:
        try:
            server.wait_ready()
            yield server
            if server.alive():
                until(lambda: not held(server))
                assert "Traceback" not in server.log()
                assert server.stop() == 0
        finally:
            (Path("/dev/shm") / server.shm_name).unlink(missing_ok=True)


def held(server: CacheServer) -> list[int]:
    """What engines have not given back yet: empty when nothing."""
    status = server.status()
    l1 = status["l1"]
    counts = [*(status[name] for name in ("sessions", "leases", "reservations")), l1["staged"], l1["leased_objects"]]
    return [count for count in counts if count]


class SmallEngine:
    """One instance with one worker of one rank and one object group, over one client."""

    def __init__(
        self,
        address: int | str,
        *,
        instance_id: str = "",
        payload_bytes: int = 4096,
        heartbeat: float = 10.0,
        on_new_server: Callable[[Client], None] | None = None,
        transfer: WantedTransfer = WantedTransfer.AUTO,
        layout: str = LAYOUT,
        model_name: str = "model",
        curve: CurveFiles | None = None,
        lookahead_tokens: int = 0,
    ) -> None:
        """`address`: a port of this machine, or a URL. `lookahead_tokens`: it names chunks as an engine with a head."""
        self.client = Client(
            f"tcp://127.0.0.1:{address}" if isinstance(address, int) else address,
            heartbeat_interval_seconds=heartbeat,
            on_new_server=on_new_server,
            transfer=transfer,
            curve=curve,
        )
        self.instance_id = instance_id or f"engine-{uuid.uuid4().hex[:8]}"
        self.payload_bytes = payload_bytes
        self.layout = layout
        self.model_name = model_name
        self._heartbeat = heartbeat
        self._lookahead_tokens = lookahead_tokens

    def start(self, timeout_seconds: float = CALL_SECONDS) -> SmallEngine:
        self.client.register(
            m.RegisterInstance(
                *(self.instance_id, self.model_name, 1, 1, self._heartbeat, "small engine"),
                lookahead_tokens=self._lookahead_tokens,
            ),
            timeout_seconds,
        )
        self.client.register(
            m.RegisterWorker(self.instance_id, 0, 0, [self.layout], [self.payload_bytes], True, self._heartbeat),
            timeout_seconds,
        )
        return self

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> SmallEngine:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- calls -------------------------------------------------------------------------------------------------------
    def tokens(self, *chunks: int) -> bytes:
        """Packed tokens of full chunks, each filled with its number."""
        assert self.client.hello is not None
        return pack_tokens([chunk for chunk in chunks for _ in range(self.client.hello.chunk_tokens)])

    def lookup(self, request: str, tokens: bytes, *, salt: str = "", deadline_seconds: float = 10.0) -> m.LookupReply:
        message = m.Lookup(self.instance_id, request, salt, 0, tokens, deadline_seconds=deadline_seconds)
        reply: m.LookupReply = self.client.call("lookup", message, CALL_SECONDS)
        return reply

    def end(self, request: str) -> None:
        self.client.call("end_session", m.EndSession(self.instance_id, request), CALL_SECONDS)

    def hashes(self, tokens: bytes, *, salt: str = "") -> bytes:
        identity = b""
        if ahead := TOKEN_BYTES * self._lookahead_tokens:
            identity, tokens = msgspec.msgpack.encode(("beginning", tokens[:ahead])), tokens[ahead:]
        message = m.Append(self.instance_id, "hashes", salt, 0, tokens, identity)
        reply: m.AppendReply = self.client.call("append", message, CALL_SECONDS)
        self.end("hashes")
        return reply.hashes

    def reserve(self, hashes: bytes, *, salt: str = "") -> m.ReserveReply:
        reply: m.ReserveReply = self.client.call("reserve", m.Reserve(self.instance_id, 0, salt, hashes), CALL_SECONDS)
        return reply

    def commit(self, reservation: int, written: bytes = b"") -> int:
        reply: m.CommitReply = self.client.call(
            "commit", m.Commit(self.instance_id, 0, reservation, written), CALL_SECONDS
        )
        return reply.committed

    # ---- bytes -------------------------------------------------------------------------------------------------------
    def fill(self, hashes: bytes, slots: Sequence[int], *, salt: str = "") -> None:
        """Writes whole frames, as a worker does."""
        assert self.client.memory is not None
        template = header_template(self.namespace(salt), self.payload_bytes)
        for chunk_hash, slot in zip(split(hashes), slots, strict=True):
            if slot != NO_SLOT:
                payload = self.client.memory.view(slot + FRAME_HEADER_BYTES, self.payload_bytes)
                payload[:] = self.payload(chunk_hash)
                _native.frame_seal(self.client.memory.address + slot, template, chunk_hash)

    def namespace(self, salt: str) -> Namespace:
        return Namespace(self.model_name, 1, 0, 0, self.layout, salt)

    def payload(self, chunk_hash: bytes) -> bytes:
        """What this chunk's KV is."""
        return hashlib.shake_128(chunk_hash).digest(self.payload_bytes)

    def store(self, tokens: bytes, *, salt: str = "") -> int:
        hashes = self.hashes(tokens, salt=salt)
        reply = self.reserve(hashes, salt=salt)
        if self.client.memory is None:
            self.send(hashes, reply, salt=salt)
        else:
            self.fill(hashes, unpack_slots(reply.slots), salt=salt)
        return self.commit(reply.reservation) if reply.reservation else 0

    def read(self, reply: m.LookupReply, *, salt: str = "") -> bool:
        """Whether every hit chunk is exactly what was stored for it."""
        memory = self.client.memory
        if memory is None:
            return all(fetched == "" for fetched in self.fetch(reply, salt=salt))
        of = self.namespace(salt)
        frame_bytes = FRAME_HEADER_BYTES + self.payload_bytes
        for chunk_hash, slot in zip(split(reply.hashes), unpack_slots(reply.slots)):  # noqa: B905
            if any(verify_frames([ObjectKey(of, chunk_hash)], [memory.view(slot, frame_bytes)])):
                return False
            if bytes(memory.view(slot + FRAME_HEADER_BYTES, self.payload_bytes)) != self.payload(chunk_hash):
                return False
        return True

    # ---- bytes over the socket ---------------------------------------------------------------------------------------
    def mover(self) -> FrameMover:
        return FrameMover(self.client, self.client.server_epoch, self.instance_id, 0, lambda: False)

    def frame(self, chunk_hash: bytes, *, salt: str = "") -> memoryview:
        memory = bytearray(FRAME_HEADER_BYTES + self.payload_bytes)
        memory[FRAME_HEADER_BYTES:] = self.payload(chunk_hash)
        template = header_template(self.namespace(salt), self.payload_bytes)
        _native.frame_seal(_native.buffer_address(memory), template, chunk_hash)
        return memoryview(memory)

    def send(self, hashes: bytes, reply: m.ReserveReply, *, salt: str = "") -> list[bool]:
        frames = [
            Frame(0, chunk, self.frame(chunk_hash, salt=salt))
            for chunk, (chunk_hash, slot) in enumerate(zip(split(hashes), unpack_slots(reply.slots), strict=True))
            if slot != NO_SLOT
        ]
        return self.mover().send(reply.reservation, frames)

    def fetch(self, reply: m.LookupReply, *, salt: str = "") -> list[str]:
        """What is wrong with each hit chunk, "" for nothing."""
        frame_bytes = FRAME_HEADER_BYTES + self.payload_bytes
        frames = [Frame(0, chunk, memoryview(bytearray(frame_bytes))) for chunk in range(reply.chunks)]
        of = self.namespace(salt)
        faults = []
        for came, frame, chunk_hash in zip(self.mover().fetch(reply.lease, frames), frames, split(reply.hashes)):  # noqa: B905
            if not came:
                faults.append("did not come")
                continue
            (fault,) = verify_frames([ObjectKey(of, chunk_hash)], [frame.memory])
            same = bytes(frame.memory[FRAME_HEADER_BYTES:]) == self.payload(chunk_hash)
            faults.append(fault or ("" if same else "other bytes"))
        return faults


def split(hashes: bytes) -> list[bytes]:
    return [hashes[start : start + CHUNK_HASH_BYTES] for start in range(0, len(hashes), CHUNK_HASH_BYTES)]


def unpack_slots(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 8}Q", packed))
