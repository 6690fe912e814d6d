"""What an engine with KV events is told of its chunks, and what it is not told."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache import _native
from lmcache.core import limits
from lmcache.core.key import Namespace, ObjectKey
from lmcache.errors import RemoteError
from lmcache.protocol import messages as m
from unit.service.support import LAYOUT, SERVER_EPOCH, Service, a_service, chunks

L1, L2 = 1, 2
HASH = 32


class Reader:
    """An engine that goes on from cursor to cursor."""

    def __init__(self, service: Service, *salts: str, instance: str = "engine", shared_l2: bool = False) -> None:
        self.service = service
        self.salts = list(salts or ("",))
        self.instance = instance
        self.shared_l2 = shared_l2
        self.cursor: list[int] = []
        self.reply = m.ChunkChangesReply([], False, False, [], b"", b"", b"")

    def read(self, asked: Sequence[tuple[int, bytes]] = (), **fields: Any) -> dict[tuple[str, bytes], int]:
        """Tiers by salt and chunk."""
        message = m.ChunkChanges(
            self.instance,
            fields.get("epoch", SERVER_EPOCH),
            self.cursor,
            self.salts,
            array("I", [salt for salt, _ in asked]).tobytes(),
            b"".join(chunk_hash for _, chunk_hash in asked),
            self.shared_l2,
            fields.get("counts", []),
        )
        self.reply = reply = self.service.changes.chunk_changes(message)
        self.cursor = reply.cursor
        salts = memoryview(reply.salts).cast("I")
        names = [reply.hashes[start : start + HASH] for start in range(0, len(reply.hashes), HASH)]
        return {(self.salts[salt], name): tiers for salt, name, tiers in zip(salts, names, reply.tiers, strict=True)}


def hashes(service: Service, tokens: bytes) -> list[bytes]:
    packed = service.hashes(tokens)
    return [packed[start : start + HASH] for start in range(0, len(packed), HASH)]


def use(service: Service, *salts: str, instance: str = "engine") -> None:
    """A request of each salt, too short to have a chunk."""
    for salt in salts:
        service.lookup("use", chunks(1)[:4], salt=salt, instance=instance)
        service.end("use", instance)


def remove(service: Service, chunk_hash: bytes, *, rank: int = 0, ranks: int = 1, salt: str = "") -> None:
    digest = Namespace("model", ranks, rank, 0, LAYOUT, salt).digest
    assert service.l1.core.remove(digest, chunk_hash) == 1


def test_chunks_that_come_and_go_are_told_once_each() -> None:
    with a_service() as service:
        service.register()
        use(service, "")
        reader = Reader(service)
        assert reader.read() == {} and reader.reply.lost
        service.store(chunks(1, 2, 3))
        names = hashes(service, chunks(1, 2, 3))
        assert reader.read() == {("", name): L1 for name in names}
        assert not reader.reply.lost and not reader.reply.more
        assert reader.read() == {}
        remove(service, names[1])
        assert reader.read() == {("", names[1]): 0}
        remove(service, names[2])
        service.store(chunks(1, 2, 3))  # back again before anybody asked
        assert reader.read() == {("", names[1]): L1, ("", names[2]): L1}


def test_nothing_is_noted_before_somebody_asks_and_after_all_have_gone() -> None:
    with a_service() as service:
        service.register()
        use(service, "")
        assert service.l1.core.changes(0, 1).lost
        reader = Reader(service)
        reader.read()
        service.store(chunks(1))
        assert not service.l1.core.changes(reader.cursor[1], 1).lost
        service.clock.advance(limits.CHANGES_UNREAD_SECONDS / 2)
        reader.read()
        service.clock.advance(limits.CHANGES_UNREAD_SECONDS / 2)
        service.loop.run()
        reader.read()  # it has asked meanwhile
        assert not reader.reply.lost
        service.clock.advance(2 * limits.CHANGES_UNREAD_SECONDS)
        service.loop.run()
        assert service.l1.core.changes(reader.cursor[1], 1).lost
        assert reader.read() == {} and reader.reply.lost
        assert service.sample("chunk_changes_lost_total") == 1


def test_a_salt_in_use_stays_known_however_many_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its chunks would be taken back from routers, and announced again, time and again."""
    monkeypatch.setattr(limits, "MAX_TENANTS_KEPT_PER_INSTANCE", 4)
    with a_service() as service:
        service.register()
        use(service, "")
        reader = Reader(service)
        reader.read()
        for number in range(12):
            use(service, "", f"user-{number}")
            reader.read()
            assert reader.reply.unused_salts == []
        use(service, *(f"user-{number}" for number in range(4)))
        reader.read()
        assert reader.reply.unused_salts == [0]


def test_only_salts_of_which_something_has_changed_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []

    class Page:
        def __init__(self, page: _native.ChangePage) -> None:
            self.page = page

        def __len__(self) -> int:
            return len(self.page)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.page, name)

        def chunks(self, digests: bytes, width: int) -> tuple[bytes, bytes]:
            looked_at.append(len(digests) // HASH)
            return self.page.chunks(digests, width)

    with a_service() as service:
        service.register(ranks=2)
        salts = [f"tenant-{number}" for number in range(20)]
        use(service, *salts)
        reader = Reader(service, *salts)
        reader.read()
        (core,) = service.changes._sources  # noqa: SLF001
        index = SimpleNamespace(
            changes=lambda cursor, most: Page(core.index.changes(cursor, most)),
            watch_changes=core.index.watch_changes,
            unwatch_changes=core.index.unwatch_changes,
        )
        monkeypatch.setattr(service.changes, "_sources", [replace(core, index=index)])
        for salt in (salts[3], salts[7]):
            service.store(chunks(1), salt=salt, workers=2)
        assert set(reader.read()) == {(salt, hashes(service, chunks(1))[0]) for salt in (salts[3], salts[7])}
        assert reader.read() == {}
        assert looked_at == [2 * 2]


def test_a_chunk_is_there_when_every_rank_and_group_has_it() -> None:
    with a_service() as service:
        service.register(ranks=2)
        use(service, "")
        reader = Reader(service)
        reader.read()
        (name,) = hashes(service, chunks(1))
        service.store(chunks(1), workers=1)
        assert reader.read() == {("", name): 0}
        service.store(chunks(1), workers=2)
        assert reader.read() == {("", name): L1}
        remove(service, name, rank=1, ranks=2)
        assert reader.read() == {("", name): 0}


def test_groups_that_keep_the_end_of_a_prompt_alone_do_not_count_beside_others() -> None:
    with a_service() as service:
        service.register(groups=2, tails=[0, 8])
        use(service, "")
        reader = Reader(service)
        reader.read()
        names = hashes(service, chunks(1, 2))
        wanted = bytes([1, 1, 0, 1])  # [group][chunk]
        reserved = service.stores.reserve(m.Reserve("engine", 0, "", b"".join(names), wanted))
        service.commit(reserved.reservation)
        assert reader.read() == {("", name): L1 for name in names}


def test_an_instance_learns_of_the_salts_that_it_uses_and_of_no_other_model() -> None:
    with a_service() as service:
        service.register()
        service.register("other", layout="cd" * 16)
        use(service, "mine")
        use(service, "theirs", "mine", instance="other")
        reader = Reader(service, "theirs", "mine")
        reader.read()
        assert reader.reply.unused_salts == [0]
        service.store(chunks(1), instance="other", salt="theirs")
        service.store(chunks(1), instance="other", salt="mine")  # of another layout
        (name,) = hashes(service, chunks(1))
        assert reader.read([(0, name)]) == {}
        use(service, "theirs")
        assert reader.read([(0, name), (1, name)]) == {("theirs", name): 0, ("mine", name): 0}
        assert reader.reply.unused_salts == []
        service.store(chunks(1), salt="mine")
        assert reader.read() == {("mine", name): L1}


def test_what_is_asked_for_is_told_whether_or_not_it_has_changed() -> None:
    with a_service() as service:
        service.register()
        use(service, "")
        service.store(chunks(1, 2))
        names = hashes(service, chunks(1, 2, 3))
        reader = Reader(service)
        assert reader.read([(0, name) for name in names]) == {
            ("", names[0]): L1,
            ("", names[1]): L1,
            ("", names[2]): 0,
        }


def test_another_server_other_registrations_and_made_up_cursors_are_told_to_begin_anew() -> None:
    with a_service() as service:
        service.register()
        use(service, "")
        reader = Reader(service)
        reader.read()
        reader.read(epoch=b"x" * 16)
        assert reader.reply.lost
        reader.read()
        assert not reader.reply.lost
        service.register_worker("engine", 0)
        reader.read()
        assert reader.reply.lost and reader.reply.unused_salts == [0]
        for cursor in ([1 << 70, 0], [reader.cursor[0], -1], [0] * 5, [reader.cursor[0], 1 << 64], [-5]):
            reader.cursor = cursor
            reader.read()
            assert reader.reply.lost


def test_a_reader_that_is_far_behind_reads_on_in_bounded_calls() -> None:
    with a_service(capacity_bytes=4 * 8192) as service:
        service.register()
        use(service, "")
        reader = Reader(service)
        reader.read()
        for number in range(limits.MAX_CHANGES_PER_CALL):  # two changes each, once L1 is full
            reserved = service.stores.reserve(m.Reserve("engine", 0, "", number.to_bytes(32, "little")))
            service.commit(reserved.reservation)
        changes = reader.read()
        assert reader.reply.more
        calls = 1
        while reader.reply.more:
            changes |= reader.read()
            calls += 1
        assert calls <= 3
        assert sum(changes.values()) == 4 * L1
        assert len(changes) == limits.MAX_CHANGES_PER_CALL


class FakeRunner:
    """An adapter by its ledger."""

    def __init__(self, *, shared: bool = False, serde: str = "") -> None:
        self.native = _native.Ledger("LRU")
        self.native.set_capacity(limit_bytes=None, unit_bytes=1, object_overhead_bytes=0, folder_bytes=0)
        self.ledger = SimpleNamespace(native=self.native)
        self.config = SimpleNamespace(is_shared=shared)
        self.serde_name = serde

    def stored(self, chunk_hash: bytes, rank: int = 0, ranks: int = 1) -> ObjectKey:
        layout = f"{LAYOUT}+{self.serde_name}" if self.serde_name else LAYOUT
        key = ObjectKey(Namespace("model", ranks, rank, 0, layout, ""), chunk_hash)
        self.native.stored([key], [100])
        return key


def test_l2_counts_where_one_adapter_has_all_of_a_chunk() -> None:
    with a_service(with_l2=True) as service:
        service.storage.runners = [FakeRunner(), FakeRunner(serde="zstd"), FakeRunner(shared=True)]
        first, encoded, shared = service.storage.runners
        service.register(ranks=2)
        use(service, "")
        reader, all_reader = Reader(service), Reader(service, shared_l2=True)
        reader.read()
        all_reader.read()
        name = b"n" * 32
        key = first.stored(name, 0, 2)
        encoded.stored(name, 1, 2)
        assert reader.read() == {("", name): 0}  # between them
        encoded.stored(name, 0, 2)
        assert reader.read() == {("", name): L2}
        first.stored(name, 1, 2)
        assert reader.read() == {("", name): L2}
        first.native.lost([key])
        assert reader.read() == {("", name): L2}  # the other one has it still
        other = b"o" * 32
        for rank in range(2):
            shared.stored(other, rank, 2)
        assert reader.read() == {}
        assert all_reader.read()[("", other)] == L2
        assert reader.read([(0, other)]) == {("", other): 0}


def test_what_engines_report_is_counted() -> None:
    with a_service() as service:
        service.register()
        use(service, "")
        reader = Reader(service)
        reader.read([(0, b"n" * 32)], counts=[5, 2, 3, 1])
        reader.read(counts=[1])
        assert service.sample("kv_events_chunks_total", type="stored") == 6
        assert service.sample("kv_events_chunks_total", type="removed") == 2
        assert service.sample("kv_events_skipped_chunks_total", reason="unknown") == 3
        assert service.sample("kv_events_skipped_chunks_total", reason="no_room") == 1
        assert service.sample("chunk_changes_chunks_total") == 1


def test_refusals() -> None:
    with a_service() as service:
        with pytest.raises(RemoteError, match="not registered"):
            Reader(service).read()
        service.register()
        with pytest.raises(RemoteError, match="position of a salt for each chunk"):
            Reader(service).read([(1, b"n" * 32)])
        for salts, names in ((b"", b"n" * 32), (bytes(3), b""), (bytes(4), b"n" * 31)):
            message = m.ChunkChanges("engine", SERVER_EPOCH, [], [""], salts, names)
            with pytest.raises(RemoteError):
                service.changes.chunk_changes(message)
