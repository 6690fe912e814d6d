"""An engine for the kill loop: stores and loads through the client and the workers' own copies, and checks every byte.

Run as a script it takes JSON lines: {"do": "load"} begins random stores and loads, {"do": "stop"} ends them (so does
the death of the server), {"do": "verify"} looks up everything, {"do": "quit"}. Every answer is a line: what was found.
What must never happen is that a copy which verified has other bytes than were stored for its key.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from lmcache import _native
from lmcache.client import Client
from lmcache.client.client import ClientState
from lmcache.core.frame import header_template
from lmcache.core.key import Namespace
from lmcache.errors import LMCacheError
from lmcache.protocol import messages as m
from process.support import CALL_SECONDS, LAYOUT, NO_SLOT, SmallEngine, split, unpack_slots

PROMPTS = 12
MAX_CHUNKS = 16
PAYLOAD_BYTES = 28 * 1024
WAIT_SECONDS = 60.0


@dataclass
class Found:
    """`wrong`: copies that verified and have other bytes. `lost`: chunks whose commit was acknowledged and that were no
    hit. `unreadable`: hits that did not verify."""

    stored: int = 0
    hits: int = 0
    exact: int = 0
    wrong: int = 0
    unreadable: int = 0
    lost: int = 0
    detail: str = ""


class EpochCopier:
    """A copier over the memory of one server epoch."""

    def __init__(self, client: Client, blocks: mmap.mmap) -> None:
        assert client.memory is not None
        self.server_epoch = client.server_epoch
        self.native = _native.PagedCopier(client.memory.address, client.memory.size_bytes, 1)
        self.native.add_group(
            [(_native.buffer_address(blocks), PAYLOAD_BYTES, PAYLOAD_BYTES, ())], 1, len(blocks) // PAYLOAD_BYTES
        )


class KillEngine:
    def __init__(self, port: int, name: str, seed: int) -> None:
        self._dice = random.Random(seed)
        self._blocks = mmap.mmap(-1, MAX_CHUNKS * PAYLOAD_BYTES)
        self._copier: EpochCopier | None = None
        self._lock = threading.Lock()  # of the copier: nobody copies while it changes
        self._requests = 0
        self._hashes: dict[int, bytes] = {}
        self._payloads: dict[bytes, bytes] = {}
        self._acknowledged: dict[int, set[int]] = {}
        self._namespace = Namespace("model", 1, 0, 0, LAYOUT)
        self._template = header_template(self._namespace, PAYLOAD_BYTES)
        self._engine = SmallEngine(
            port, instance_id=name, payload_bytes=PAYLOAD_BYTES, heartbeat=0.2, on_new_server=self._meet
        ).start(WAIT_SECONDS)

    def _meet(self, client: Client) -> None:
        with self._lock:
            if self._copier is not None:
                self._copier.native.close()
            self._copier = EpochCopier(client, self._blocks)

    # ---- orders ------------------------------------------------------------------------------------------------------
    def load(self, stopped: Callable[[], bool]) -> Found:
        """Until asked to stop, or until the server does not answer."""
        found = Found()
        try:
            while not stopped():
                prompt, chunks = self._dice.randrange(PROMPTS), self._dice.randint(1, MAX_CHUNKS)
                if self._dice.random() < 0.5:
                    self._store(prompt, chunks, found)
                else:
                    self._retrieve(prompt, chunks, found)
        except LMCacheError:
            pass  # killed in the middle of it
        return found

    def verify(self, server_epoch: str) -> Found:
        """Of everything that there is in the epoch after that one."""
        client = self._engine.client
        deadline = time.monotonic() + WAIT_SECONDS
        while client.server_epoch.hex() == server_epoch or not self._registered():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server is not back: {client.state}")
            time.sleep(0.01)
        found = Found()
        for prompt in range(PROMPTS):
            hits = self._retrieve(prompt, MAX_CHUNKS, found)
            acknowledged = self._acknowledged.get(prompt, set())
            expected = next(chunk for chunk in range(MAX_CHUNKS + 1) if chunk not in acknowledged)
            found.lost += max(0, expected - hits)
            if expected > hits:
                found.detail += f" prompt {prompt}: {hits} of {expected};"
        return found

    def server_epoch(self) -> str:
        return self._engine.client.server_epoch.hex()

    def _registered(self) -> bool:
        client, name = self._engine.client, self._engine.instance_id
        return client.state is ClientState.READY and None not in (client.owner(name), client.owner(name, 0))

    # ---- what an engine does -----------------------------------------------------------------------------------------
    def _store(self, prompt: int, chunks: int, found: Found) -> None:
        server_epoch = self._engine.client.server_epoch
        hashes = self._hashes_of(prompt)[: 32 * chunks]
        reply = self._engine.reserve(hashes)
        if not reply.reservation:
            return
        slots = unpack_slots(reply.slots)
        if self._dice.random() < 0.05:
            return  # an engine that forgets what it reserved; the slots are its own until it registers anew
        with self._copying(server_epoch) as copier:
            for chunk, chunk_hash in enumerate(split(hashes)):
                self._blocks[chunk * PAYLOAD_BYTES : (chunk + 1) * PAYLOAD_BYTES] = self._payload(chunk_hash)
            blocks = b"".join(chunk.to_bytes(8, "little") for chunk in range(chunks))
            written = _wait(copier, copier.native.submit_store(0, reply.slots, blocks, hashes, self._template))
        committed = self._engine.commit(reply.reservation, written)
        found.stored += committed
        if committed == sum(written):
            self._acknowledged.setdefault(prompt, set()).update(c for c, slot in enumerate(slots) if slot != NO_SLOT)

    def _retrieve(self, prompt: int, chunks: int, found: Found) -> int:
        """The length of the hit."""
        engine = self._engine
        server_epoch = engine.client.server_epoch
        self._requests += 1
        request = f"request {self._requests}"
        tokens = self._tokens(prompt, chunks)
        reply = engine.lookup(request, tokens, deadline_seconds=CALL_SECONDS)
        if reply.chunks:
            found.hits += reply.chunks
            blocks = b"".join(chunk.to_bytes(8, "little") for chunk in range(reply.chunks))
            with self._copying(server_epoch) as copier:
                self._blocks[:] = bytes(len(self._blocks))
                hashes = reply.hashes[: 32 * reply.chunks]
                job = copier.native.submit_load(0, reply.slots, blocks, hashes, self._namespace.digest)
                verified = _wait(copier, job)
            expected = split(self._hashes_of(prompt))
            for chunk, (chunk_hash, is_good) in enumerate(zip(split(hashes), verified, strict=True)):
                content = self._blocks[chunk * PAYLOAD_BYTES : (chunk + 1) * PAYLOAD_BYTES]
                if chunk_hash != expected[chunk] or (is_good and content != self._payload(chunk_hash)):
                    found.wrong += 1
                elif is_good:
                    found.exact += 1
                else:
                    found.unreadable += 1
            unreadable = [chunk for chunk, is_good in enumerate(verified) if not is_good]
            engine.client.call("release", m.Release(engine.instance_id, reply.lease, unreadable), CALL_SECONDS)
        engine.end(request)
        return reply.chunks

    @contextlib.contextmanager
    def _copying(self, server_epoch: bytes):  # type: ignore[no-untyped-def]
        """As a worker: only into the memory that the slots are of, and the keeper waits until the copy has ended."""
        with self._lock:
            if self._copier is None or self._copier.server_epoch != server_epoch:
                raise LMCacheError("the server that this was meant for is gone")
            yield self._copier

    # ---- what is stored ----------------------------------------------------------------------------------------------
    def _tokens(self, prompt: int, chunks: int) -> bytes:
        return self._engine.tokens(*(1000 * prompt + chunk for chunk in range(chunks)))

    def _hashes_of(self, prompt: int) -> bytes:
        if prompt not in self._hashes:
            self._hashes[prompt] = self._engine.hashes(self._tokens(prompt, MAX_CHUNKS))
        return self._hashes[prompt]

    def _payload(self, chunk_hash: bytes) -> bytes:
        if chunk_hash not in self._payloads:
            self._payloads[chunk_hash] = hashlib.shake_128(chunk_hash).digest(PAYLOAD_BYTES)
        return self._payloads[chunk_hash]

    def close(self) -> None:
        self._engine.close()


def _wait(copier: EpochCopier, job: int) -> bytes:
    while (done := copier.native.wait(job, 1.0)) is None:
        pass
    return done


def main(arguments: Sequence[str]) -> None:
    port, name, seed = arguments
    engine = KillEngine(int(port), name, int(seed))
    orders: queue.Queue[dict[str, str]] = queue.Queue()
    loads, stops = 0, 0

    def read() -> None:
        nonlocal stops
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "stop":
                stops += 1
            else:
                orders.put(order)
        stops += 1
        orders.put({"do": "quit"})

    threading.Thread(target=read, daemon=True).start()
    print("ready", flush=True)
    while (order := orders.get())["do"] != "quit":
        if order["do"] == "load":
            loads += 1
            answer: object = asdict(engine.load(lambda number=loads: stops >= number))
        elif order["do"] == "verify":
            answer = asdict(engine.verify(order["after"]))
        else:
            answer = engine.server_epoch()
        print(json.dumps(answer), flush=True)
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1:])
