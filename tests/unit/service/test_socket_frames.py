"""Frames over the socket against a real L1: what lands, what is refused, and what ends while a copy is under way."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lmcache import _native
from lmcache.core import limits
from lmcache.core.frame import header_template
from lmcache.core.key import Namespace
from lmcache.errors import RemoteError
from lmcache.protocol import messages as m
from lmcache.transport.deferred import Bulk, Deferred
from unit.service.support import (
    LAYOUT,
    NO_SLOT,
    PAYLOAD_BYTES,
    SERVER_EPOCH,
    Service,
    a_service,
    chunks,
    has_answer,
    slots,
)

FRAME = limits.FRAME_HEADER_BYTES + PAYLOAD_BYTES  # what travels


class Payload:
    """One socket worker over a real service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.copies = service.copy_thread
        self.owners: list[int] = []
        self.sent: list[Bulk] = []  # all, so that no two have the same address
        service.liveness.register_instance(m.RegisterInstance("engine", "model", 1, 1, 10.0))
        self.register()

    def register(self, mode: str = "socket") -> None:
        message = m.RegisterWorker("engine", 0, 0, [LAYOUT], [PAYLOAD_BYTES], True, 10.0, [], mode, "another host")
        self.owners.append(self.service.liveness.register_worker(message).owner)

    def run(self) -> None:
        while self.copies.waiting:
            self.copies.waiting.pop(0)()
        self.service.loop.run()

    def start_write(self, reservation: int, data: bytes, *, chunk: int = 0, offset: int = 0, **other: Any) -> Deferred:
        fields = {"instance_id": "engine", "worker_id": 0, "server_epoch": SERVER_EPOCH, "group": 0, **other}
        return self.service.socket_frames.write(
            m.Write(reservation=reservation, chunk=chunk, offset=offset, data=memoryview(data), **fields)
        )

    def write(self, reservation: int, data: bytes, **where: Any) -> Any:
        deferred = self.start_write(reservation, data, **where)
        self.run()
        return self.answer_of(deferred)

    def start_read(
        self, lease: int, size_bytes: int = FRAME, *, chunk: int = 0, offset: int = 0, **other: Any
    ) -> Deferred:
        fields = {"instance_id": "engine", "worker_id": 0, "server_epoch": SERVER_EPOCH, "group": 0, **other}
        return self.service.socket_frames.read(
            m.Read(lease=lease, chunk=chunk, offset=offset, size_bytes=size_bytes, **fields)
        )

    def read(self, lease: int, size_bytes: int = FRAME, **where: Any) -> Any:
        deferred = self.start_read(lease, size_bytes, **where)
        self.run()
        return self.answer_of(deferred)

    def answer_of(self, deferred: object) -> Any:
        assert isinstance(deferred, Deferred)
        answers: list[object] = []
        deferred.bind(answers.append)
        [answer] = answers
        if isinstance(answer, Bulk):
            [data] = _decode(bytes(answer.payload))
            answer.sent = True
            self.sent.append(answer)
            return data
        return answer

    def frames(self, tokens: bytes, salt: str = "") -> list[bytes]:
        hashes = self.service.hashes(tokens)
        return [frame(hashes[at : at + 32], salt) for at in range(0, len(hashes), 32)]

    def store(self, tokens: bytes) -> list[bytes]:
        frames = self.frames(tokens)
        reply = self.service.reserve(tokens)
        for chunk, content in enumerate(frames):
            assert self.write(reply.reservation, content, chunk=chunk) == m.WriteReply(FRAME)
        assert self.service.commit(reply.reservation) == len(frames)
        return frames


def frame(chunk_hash: bytes, salt: str = "") -> bytes:
    memory = bytearray(limits.FRAME_HEADER_BYTES + PAYLOAD_BYTES)
    memory[limits.FRAME_HEADER_BYTES :] = hashlib.shake_128(chunk_hash).digest(PAYLOAD_BYTES)
    template = header_template(Namespace("model", 1, 0, 0, LAYOUT, salt), PAYLOAD_BYTES)
    _native.frame_seal(_native.buffer_address(memory), template, chunk_hash)
    return bytes(memory)


def _decode(payload: bytes) -> list[bytes]:
    import msgspec

    reply = msgspec.msgpack.Decoder(m.ReadReply).decode(payload)
    return [bytes(reply.data)]


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(RemoteError) as refusal:
        call()
    return refusal.value.code


@pytest.fixture
def payload() -> Iterator[Payload]:
    with a_service() as service:
        made = Payload(service)
        yield made
        made.run()
        assert not any(service.copies.is_copying(owner) for owner in made.owners)


def test_what_is_written_in_parts_is_read_back_in_others(payload: Payload) -> None:
    tokens = chunks(1, 2)
    reply = payload.service.reserve(tokens)
    contents = payload.frames(tokens)
    for chunk, content in enumerate(contents):
        for start, end in ((0, 4096), (4096, 4097), (4097, FRAME)):
            answer = payload.write(reply.reservation, content[start:end], chunk=chunk, offset=start)
            assert answer == m.WriteReply(end)
    assert payload.service.commit(reply.reservation) == 2
    hit = payload.service.lookup("r", tokens)
    for chunk, content in enumerate(contents):
        parts = [
            payload.read(hit.lease, end - start, chunk=chunk, offset=start)
            for start, end in ((0, 1), (1, 5000), (5000, FRAME))
        ]
        assert b"".join(parts) == content
    payload.service.end("r")
    assert refused(lambda: payload.start_read(hit.lease)) == "ended"


def test_only_whole_frames_are_published(payload: Payload) -> None:
    tokens = chunks(1, 2, 3)
    contents = payload.frames(tokens)
    reply = payload.service.reserve(tokens)
    payload.write(reply.reservation, contents[0], chunk=0)
    payload.write(reply.reservation, contents[1][:5000], chunk=1)  # short; nothing at all of the third
    assert payload.service.commit(reply.reservation) == 1
    assert payload.service.lookup("r", tokens, deadline_seconds=0.0).chunks == 1
    payload.service.end("r")


def test_a_frame_that_does_not_verify_is_not_published(payload: Payload) -> None:
    tokens = chunks(1, 2, 3)
    contents = payload.frames(tokens)
    flipped = bytearray(contents[1])
    flipped[5000] ^= 1
    reply = payload.service.reserve(tokens)
    assert payload.write(reply.reservation, contents[0], chunk=0) == m.WriteReply(FRAME)
    for chunk, content in ((1, bytes(flipped)), (2, contents[1])):  # a wrong byte; a frame of another key
        answer = payload.write(reply.reservation, content, chunk=chunk)
        assert isinstance(answer, RemoteError) and answer.code == "bad_request"
    assert payload.service.commit(reply.reservation, b"\1\1\1") == 1
    assert payload.service.sample("corrupt_frames_total", tier="socket") == 2


def test_parts_out_of_order_or_beyond_the_frame_are_refused(payload: Payload) -> None:
    reply = payload.service.reserve(chunks(1))
    [content] = payload.frames(chunks(1))
    write = payload.start_write
    assert refused(lambda: write(reply.reservation, content[4096:], offset=4096)) == "bad_request"
    assert payload.write(reply.reservation, content[:4096]) == m.WriteReply(4096)
    for data, offset in ((content[:4096], 0), (content[5000:], 5000), (content, 4096), (b"", 4096), (b"x", -1)):
        with pytest.raises(RemoteError):
            write(reply.reservation, data, offset=offset)
    too_long = bytes(limits.MAX_PAYLOAD_PART_BYTES + 1)
    assert refused(lambda: write(reply.reservation, too_long, offset=4096)) == "bad_request"
    for where in ({"chunk": 1}, {"chunk": -1}, {"group": 1}, {"group": -1}):
        assert refused(lambda where=where: write(reply.reservation, b"x", **where)) == "bad_request"
    assert refused(lambda: write(reply.reservation + 1, content)) == "ended"
    assert refused(lambda: write(reply.reservation, content, server_epoch=b"old")) == "ended"
    assert refused(lambda: write(reply.reservation, content, worker_id=1)) == "unknown_instance"
    assert payload.write(reply.reservation, content[4096:], offset=4096) == m.WriteReply(FRAME)
    assert payload.service.commit(reply.reservation) == 1


def test_wild_reads_are_refused(payload: Payload) -> None:
    payload.store(chunks(1, 2))
    hit = payload.service.lookup("r", chunks(1, 2))
    read = payload.start_read
    for size, where in ((FRAME + 1, {}), (1, {"offset": FRAME}), (0, {}), (-1, {}), (1, {"offset": -1})):
        assert refused(lambda size=size, where=where: read(hit.lease, size, **where)) == "bad_request"
    for where in ({"chunk": 2}, {"chunk": -1}, {"group": 1}):
        assert refused(lambda where=where: read(hit.lease, **where)) == "bad_request"
    assert refused(lambda: read(hit.lease + 1)) == "ended"
    assert refused(lambda: read(hit.lease, server_epoch=b"old")) == "ended"
    payload.service.end("r")


def test_a_worker_that_maps_the_memory_does_not_use_the_socket(payload: Payload) -> None:
    payload.register("shm")
    assert refused(lambda: payload.start_write(1, b"x")) == refused(lambda: payload.start_read(1)) == "bad_request"
    assert refused(lambda: payload.register("pigeon")) == "bad_request"


def test_a_chunk_without_a_slot_is_not_written(payload: Payload) -> None:
    payload.store(chunks(1))
    reply = payload.service.reserve(chunks(1, 2))
    assert slots(reply.slots)[0] == NO_SLOT
    assert refused(lambda: payload.start_write(reply.reservation, b"x", chunk=0)) == "bad_request"
    payload.service.commit(reply.reservation, b"\0\0")


def test_a_commit_waits_for_the_copies_that_came_before_it(payload: Payload) -> None:
    tokens = chunks(1)
    reply = payload.service.reserve(tokens)
    payload.start_write(reply.reservation, payload.frames(tokens)[0])
    late = payload.service.stores.commit(m.Commit("engine", 0, reply.reservation))
    assert not has_answer(late)
    payload.run()
    assert payload.answer_of(late) == m.CommitReply(1)


@pytest.mark.parametrize("end", ["registered again", "unregistered", "died"])
def test_a_slot_is_not_free_while_a_late_part_is_copied_into_it(payload: Payload, end: str) -> None:
    tokens = chunks(1)
    service = payload.service
    reply = service.reserve(tokens)
    written = payload.start_write(reply.reservation, payload.frames(tokens)[0])
    late = service.stores.commit(m.Commit("engine", 0, reply.reservation))
    if end == "registered again":
        payload.register()
    elif end == "unregistered":
        service.liveness.unregister(m.Unregister("engine", 0))
    else:
        service.clock.advance(31.0)
        service.liveness.beat(m.Ping("engine", -1))
        service.liveness.sweep()
    assert service.stat("used_bytes") > 0  # nobody else gets the slot yet
    service.owners.release_quarantine()
    assert service.stat("used_bytes") > 0
    payload.run()
    assert payload.answer_of(written) == m.WriteReply(FRAME)
    answer = payload.answer_of(late)
    assert answer == m.CommitReply(0) or answer.code == "unknown_instance"
    service.owners.release_quarantine()
    assert service.stat("used_bytes") == service.stat("objects") == 0
    with pytest.raises(RemoteError):
        payload.start_write(reply.reservation, b"x")


def test_a_lease_that_expires_under_a_read_never_gives_the_bytes_of_another_key() -> None:
    with a_service(capacity_bytes=2 * 8192) as service:
        payload = Payload(service)
        payload.store(chunks(1, 2))
        hit = service.lookup("r", chunks(1, 2))
        under_way = payload.start_read(hit.lease)
        slow = payload.copies.waiting.pop()
        for _ in range(9):  # the worker runs, the scheduler side does not renew
            service.clock.advance(40.0)
            service.liveness.beat(m.Ping("engine", 0))
            service.registry.instances["engine"].scheduler.last_seen_seconds = service.clock.monotonic()
        service.liveness.sweep()
        assert service.stat("leases") == 0
        payload.store(chunks(3, 4))  # takes both slots
        slow()
        payload.run()
        answer = payload.answer_of(under_way)
        assert isinstance(answer, RemoteError) and answer.code == "ended"
        answer = payload.read(hit.lease, chunk=1)
        assert isinstance(answer, RemoteError) and answer.code == "ended"
        service.end("r")


def test_what_is_on_its_way_is_bounded(payload: Payload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PAYLOAD_BYTES_PER_WORKER", 2 * FRAME)
    tokens = chunks(1, 2, 3)
    contents = payload.frames(tokens)
    reply = payload.service.reserve(tokens)
    payload.start_write(reply.reservation, contents[0], chunk=0)
    payload.start_write(reply.reservation, contents[1], chunk=1)
    assert refused(lambda: payload.start_write(reply.reservation, contents[2], chunk=2)) == "too_many"
    payload.run()
    payload.write(reply.reservation, contents[2], chunk=2)
    assert payload.service.commit(reply.reservation) == 3
    hit = payload.service.lookup("r", tokens)
    unread = payload.start_read(hit.lease), payload.start_read(hit.lease)
    payload.run()
    assert refused(lambda: payload.start_read(hit.lease)) == "too_many"  # made, and not yet sent
    for deferred in unread:
        payload.answer_of(deferred)
    payload.service.end("r")


def test_a_closing_server_refuses(payload: Payload) -> None:
    reply = payload.service.reserve(chunks(1))
    payload.copies.closed = True
    assert refused(lambda: payload.start_write(reply.reservation, b"x")) == "shutting_down"
    payload.copies.closed = False
    assert payload.write(reply.reservation, payload.frames(chunks(1))[0]) == m.WriteReply(FRAME)
    payload.service.commit(reply.reservation)


def test_memory_of_answers_is_used_again_and_let_go_when_idle(payload: Payload) -> None:
    [content] = payload.store(chunks(1))
    hit = payload.service.lookup("r", chunks(1))
    kept = limits.PAYLOAD_WINDOW_BYTES // limits.MAX_PAYLOAD_PART_BYTES

    def memory_of(reads: int) -> set[int]:
        """Of the answers to so many reads at once."""
        del payload.sent[:-reads]
        under_way = [payload.start_read(hit.lease) for _ in range(reads)]
        payload.run()
        assert all(payload.answer_of(deferred) == content for deferred in under_way)
        return {id(bulk.payload) for bulk in payload.sent[-reads:]}

    previous = memory_of(3 * kept)
    assert len(previous) == 3 * kept
    assert len(memory_of(3 * kept) & previous) == kept
    for _ in range(20):
        assert payload.read(hit.lease, 100, offset=4000) == content[4000:4100]
    assert len(memory_of(1)) == 1
    payload.service.clock.advance(1.5)
    payload.service.loop.run()
    payload.service.clock.advance(1.5)
    payload.service.loop.run()
    assert not payload.service.timers()
    everything = {id(bulk.payload) for bulk in payload.sent}
    assert not memory_of(3 * kept) & everything
    payload.service.end("r")


def test_an_answer_that_is_refused_meanwhile_does_not_stay(payload: Payload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PAYLOAD_BYTES_PER_WORKER", FRAME)
    payload.store(chunks(1))
    hit = payload.service.lookup("r", chunks(1))
    deferred = payload.start_read(hit.lease)
    deferred.answer(RemoteError("too_many", "as the message loop does"))
    payload.run()
    assert not payload.service.timers()
    assert len(payload.read(hit.lease)) == FRAME  # there is room for it
    payload.service.end("r")
