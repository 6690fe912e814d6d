"""What subscribers know in the end is what the tiers have of every rank, whatever came, went or was lost meanwhile."""

from __future__ import annotations

import hashlib
import random
import socket
import subprocess
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from lmcache.clock import Clock, SystemClock
from lmcache.core import limits
from lmcache.core.address import tcp_endpoint
from lmcache.core.key import CHUNK_HASH_BYTES, Namespace
from lmcache.core.object_changes import ChangePage, ObjectsPage, Run
from lmcache.errors import ConfigError, ResourceError
from lmcache.kv_events.announcer import KVEventAnnouncer
from lmcache.kv_events.descriptions import Descriptions
from lmcache.kv_events.endpoint import Endpoint, parse_endpoint, parse_replay_endpoint
from lmcache.kv_events.event_sockets import EventSockets
from lmcache.kv_events.holdings import Holdings, Tier
from lmcache.kv_events.wire import END_OF_REPLAY, AllBlocksCleared, BlockRemoved, BlockStored, Event
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.processes import free_port
from manual_clock import ManualClock
from polling import until
from seeds import SEED

CHUNK_TOKENS = 2
LAYOUT, OTHER_LAYOUT = "5e" * 16, "6f" * 16


def chunk_hash(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def rank(number: int, layout: str = LAYOUT, *, model: str = "model", salt: str = "") -> Namespace:
    return Namespace(model, 2, number, 0, layout, salt)


class ListedTier:
    """A `ChangeSource` that remembers the last `ring` changes."""

    def __init__(self, tier: str = "l1", ring: int = 1000) -> None:
        self.tier, self.backend, self.shared = tier, "", False
        self.held: set[tuple[Namespace, bytes]] = set()
        self._changes: list[tuple[bool, Namespace, bytes]] = []
        self._ring = ring
        self.listed: list[int] = []  # where pages began
        self.page_chunks = 1 << 20

    def change(self, namespace: Namespace, chunk: int, *, added: bool) -> None:
        name = namespace, chunk_hash(chunk)
        (self.held.add if added else self.held.discard)(name)
        self._changes.append((added, *name))

    def capacity_bytes(self) -> int:
        return 0

    def cursor(self) -> int:
        return len(self._changes)

    def changes(self, cursor: int, most: int) -> ChangePage:
        if cursor < len(self._changes) - self._ring:
            return ChangePage((), len(self._changes), lost=True)
        page = self._changes[cursor : cursor + 5]
        return ChangePage([run(name, chunk, added=added) for added, name, chunk in page], cursor + len(page))

    def objects(self, start: int, most: int) -> ObjectsPage:
        self.listed.append(start)
        names, end = sorted(self.held, key=repr), start + self.page_chunks
        page = [run(*name, added=True) for name in names[start:end]]
        return ObjectsPage(page, end if end < len(names) else 0)

    def holds(self, namespaces: Sequence[Namespace], hashes: bytes) -> bytes:
        chunks = [hashes[at : at + CHUNK_HASH_BYTES] for at in range(0, len(hashes), CHUNK_HASH_BYTES)]
        return bytes(all((name, chunk) in self.held for name in namespaces) for chunk in chunks)


def run(namespace: Namespace, chunk: bytes, *, added: bool) -> Run:
    return Run(namespace, chunk, array("Q", [4096]).tobytes(), added)


class Recorded(EventSockets):
    """Without sockets: what a subscriber of everything would know."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Event]] = []
        self.known: set[tuple[str, str, bytes]] = set()  # topic, medium, chunk
        self._numbers = {}
        self.rounds = 0
        self.closed_by: list[str] = []

    def publish(self, topic: str, events: Sequence[Event]) -> None:
        self._numbers[topic] = 1
        for event in events:
            self.events.append((topic, event))
            if isinstance(event, AllBlocksCleared):
                self.known = {name for name in self.known if name[0] != topic}
            else:
                names = {(topic, event.medium, block) for block in event.block_hashes}
                self.known = self.known | names if isinstance(event, BlockStored) else self.known - names

    def repeat(self, wait_seconds: float) -> bool:
        self.rounds += 1
        return False

    def close(self) -> None:
        self.closed_by.append(threading.current_thread().name)


def an_announcer(
    sockets: Recorded,
    metrics: Metrics,
    *tiers: tuple[str, ListedTier],
    descriptions: Descriptions | None = None,
    clock: Clock | None = None,
) -> KVEventAnnouncer:
    return KVEventAnnouncer(
        sockets,
        descriptions or Descriptions(CHUNK_TOKENS),
        Holdings([Tier(medium, tier, tier.holds) for medium, tier in tiers]),
        "kv@a@{model}",
        CHUNK_TOKENS,
        metrics.kv_events,
        clock or SystemClock(),
    )


@contextmanager
def announcing(*tiers: tuple[str, ListedTier], **options: Any) -> Iterator[tuple[Recorded, Metrics, KVEventAnnouncer]]:
    sockets, metrics = Recorded(), Metrics()
    announcer = an_announcer(sockets, metrics, *tiers, **options)
    announcer.start()
    try:
        yield sockets, metrics, announcer
    finally:
        announcer.stop()


def test_in_the_end_subscribers_know_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks, in memory and on two disks, one of which loses changes."""
    monkeypatch.setattr(limits, "KV_EVENT_RETELLING_SECONDS", 0.001)
    monkeypatch.setattr(limits, "MAX_KV_EVENT_RETELLING_SECONDS", 0.01)
    rng = random.Random(SEED)
    media = [("CPU", ListedTier()), ("STORAGE", ListedTier("l2")), ("STORAGE", ListedTier("l2", ring=8))]

    def truth() -> set[tuple[str, str, bytes]]:
        return {
            ("kv@a@model", medium, chunk)
            for medium, tier in media
            for _, chunk in tier.held
            if tier.holds([rank(0), rank(1)], chunk) == b"\1"
        }

    with announcing(*media) as (sockets, metrics, _):
        for _ in range(30):
            for _ in range(rng.randrange(1, 60)):
                tier = rng.choice(media)[1]
                tier.change(rank(rng.randrange(2)), rng.randrange(10), added=rng.random() < 0.6)
            until(lambda: sockets.known == truth(), tell=lambda: sockets.known ^ truth())
        for tier in (media[2][1],) * 20:  # more at once than it remembers
            tier.change(rank(0), 99, added=True)
        until(lambda: sockets.known == truth() and lost(metrics) >= 1, tell=lambda: lost(metrics))


def lost(metrics: Metrics) -> float:
    return metrics.registry.get_sample_value("lmcache_mp_kv_events_lost_total") or 0.0


def test_each_model_has_its_topic_and_salts_have_none() -> None:
    tier = ListedTier()
    with announcing(("CPU", tier)) as (sockets, *_):
        for namespace in (
            rank(0, salt="s"),
            rank(1, salt="s"),
            rank(0),
            rank(1),
            rank(0, model="b"),
            rank(1, model="b"),
        ):
            tier.change(namespace, 1, added=True)
        until(lambda: sockets.known == {(f"kv@a@{model}", "CPU", chunk_hash(1)) for model in ("model", "b")})
        assert [topic for topic, event in sockets.events if isinstance(event, AllBlocksCleared)] == sockets.topics
        assert isinstance(sockets.events[0][1], AllBlocksCleared)


def test_an_engine_of_another_layout_takes_nothing_back() -> None:
    """What the older engine's ranks had goes, and the newer one's stays."""
    tier = ListedTier()
    with announcing(("CPU", tier)) as (sockets, *_):
        for layout in (LAYOUT, OTHER_LAYOUT):
            for number in (0, 1):
                tier.change(rank(number, layout), 1, added=True)
        until(lambda: bool(sockets.known))
        for number in (0, 1):
            tier.change(rank(number), 1, added=False)
        tier.change(rank(0, OTHER_LAYOUT), 2, added=True)
        tier.change(rank(1, OTHER_LAYOUT), 2, added=True)
        until(lambda: ("kv@a@model", "CPU", chunk_hash(2)) in sockets.known)
        assert not any(isinstance(event, BlockRemoved) for _, event in sockets.events)


def test_two_layouts_side_by_side_hide_nothing_of_each_other() -> None:
    tier = ListedTier()
    with announcing(("CPU", tier)) as (sockets, *_):
        for chunk in range(3):
            for number in (0, 1):
                for layout in (LAYOUT, OTHER_LAYOUT):  # in turns
                    tier.change(rank(number, layout), chunk + 10 * (layout == OTHER_LAYOUT), added=True)
        tier.change(rank(0, LAYOUT), 20, added=True)  # of one rank each
        tier.change(rank(1, OTHER_LAYOUT), 20, added=True)
        for number in (0, 1):
            tier.change(rank(number), 3, added=True)
        expected = {("kv@a@model", "CPU", chunk_hash(chunk)) for chunk in (0, 1, 2, 3, 10, 11, 12)}
        until(lambda: sockets.known == expected, tell=lambda: sockets.known ^ expected)


def test_ranks_of_several_layouts_belong_together_when_their_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with pipeline stages. What is there of them from before is told then."""
    monkeypatch.setattr(limits, "KV_EVENT_RETELLING_SECONDS", 0.01)
    tier = ListedTier()
    tier.change(rank(0, LAYOUT), 1, added=True)
    tier.change(rank(1, OTHER_LAYOUT), 1, added=True)
    with announcing(("CPU", tier)) as (sockets, _, announcer):
        tier.change(rank(0), 2, added=True)
        tier.change(rank(1), 2, added=True)
        until(lambda: {name[2] for name in sockets.known} == {chunk_hash(2)})
        announcer.holdings.note_ranks([[rank(0, LAYOUT)], [rank(1, OTHER_LAYOUT)]])
        until(lambda: {name[2] for name in sockets.known} == {chunk_hash(1), chunk_hash(2)})
        tier.change(rank(1, OTHER_LAYOUT), 1, added=False)
        until(lambda: {name[2] for name in sockets.known} == {chunk_hash(2)})


def test_what_is_remembered_of_layouts_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_RANK_LAYOUTS", 2)
    monkeypatch.setattr(limits, "MAX_NAMESPACES_REMEMBERED", 6)  # three times two ranks
    tier = ListedTier()
    holdings = Holdings([Tier("CPU", tier, tier.holds)])
    names = [rank(0, f"{number:032x}", model=model) for model in ("a", "b") for number in range(3)]
    for name in names:
        for number in (0, 1):
            tier.change(replace(name, rank=number), 1, added=True)

    def told() -> list[bool]:
        return [holdings.has("CPU", replace(name, layout=""), chunk_hash(1))[0] for name in (names[0], names[-1])]

    for name in names[:3]:
        holdings.note(name)
    for number in (0, 1):
        tier.change(replace(names[2], rank=number), 1, added=False)
    assert told() == [True, False]  # by the second, the first one is forgotten
    tier.change(replace(names[1], rank=1), 1, added=False)
    assert told() == [False, False]
    for name in names[3:]:
        holdings.note(name)
    tier.change(replace(names[2], rank=0), 1, added=True)
    tier.change(replace(names[2], rank=1), 1, added=True)
    assert told() == [True, True]  # three are remembered, one of them of the first model
    holdings.note(rank(0, model="c"))
    assert told() == [False, True]


def test_changes_that_stay_lost_are_not_told_anew_without_pause() -> None:
    clock, tier = ManualClock(), ListedTier(ring=-1)  # nothing of it is ever read
    with announcing(("CPU", tier), clock=clock) as (sockets, metrics, _):
        for retellings, pause_seconds in enumerate((1.0, 2.0, 4.0), 1):
            until(lambda wanted=retellings: lost(metrics) == wanted)
            clock.advance(pause_seconds - 0.01)
            until(lambda wanted=sockets.rounds + 3: sockets.rounds >= wanted)
            assert tier.listed == [0] * retellings
            clock.advance(0.02)


def test_what_was_there_before_is_told_slowly_and_what_changes_at_once() -> None:
    clock, tier, other = ManualClock(), ListedTier(), ListedTier("l2")
    tier.page_chunks = 2
    for chunk in range(4):
        for number in (0, 1):
            tier.change(rank(number), chunk, added=True)
    for number in (0, 1):
        other.change(rank(number), 0, added=True)
    with announcing(("CPU", tier), ("STORAGE", other), clock=clock) as (sockets, *_):
        until(lambda: other.listed)  # the first page of each
        for number in (0, 1):
            tier.change(rank(number), 9, added=True)
        until(lambda: ("kv@a@model", "CPU", chunk_hash(9)) in sockets.known)
        assert tier.listed == [0]
        for page in (2, 4, 6, 8):
            clock.advance(2 * limits.MAX_CHUNKS_PER_KV_EVENT_BATCH / limits.KV_EVENT_LISTED_PER_SECOND)
            until(lambda page=page: tier.listed[-1] == page)
        until(lambda: len(sockets.known) == 6)
        assert tier.listed == [0, 2, 4, 6, 8]


def test_its_own_thread_closes_the_sockets() -> None:
    sockets = Recorded()
    with announcing(("CPU", ListedTier())) as (used, *_):
        until(lambda: used.rounds)
    until(lambda: used.closed_by == ["lmcache-kv-events"])
    an_announcer(sockets, Metrics(), ("CPU", ListedTier())).stop()  # one that never started has no thread
    assert sockets.closed_by == [threading.current_thread().name]


def test_topics_are_limited_and_one_that_is_forgotten_ends_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_KV_EVENT_TOPICS", 2)
    replay = parse_endpoint(f"tcp://127.0.0.1:{free_port()}", "")
    sockets = EventSockets(parse_endpoint(f"tcp://127.0.0.1:{free_port()}", ""), replay, ManualClock(0.0))
    try:
        for topic in ("a", "b", "a", "c", "b"):
            sockets.publish(topic, [BlockRemoved([topic.encode()], "CPU")])
        assert sockets.topics == ["c", "b"]
        with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
            asking.connect(replay.address)
            asking.send_multipart((b"", bytes(8)))
            until(lambda: sockets.repeat(0.1) and asking.poll(0))
            batches = []
            while (frames := asking.recv_multipart())[2] != END_OF_REPLAY:
                batches.append((frames[1], int.from_bytes(frames[2], "big"), b"AllBlocksCleared" in frames[3]))
        assert batches == [
            *((b"a", 0, False), (b"b", 0, False), (b"a", 1, False), (b"b", 1, True), (b"c", 0, False)),
            *((b"a", 2, True), (b"b", 0, False)),
        ]
    finally:
        sockets.close()


def test_chunks_that_follow_each_other_are_in_one_event() -> None:
    descriptions, tier = Descriptions(CHUNK_TOKENS), ListedTier()
    hashes = [chunk_hash(number) for number in range(4)]
    descriptions.note(b"", b"".join(hashes[:3]), array("I", range(7)).tobytes())  # and one token of a fourth
    with announcing(("CPU", tier), descriptions=descriptions) as (sockets, *_):
        for number in (1, 0):
            for chunk in range(2):
                tier.change(rank(number), chunk, added=True)
        until(lambda: len(sockets.known) == 2)
        tier.change(rank(0), 3, added=True)
        tier.change(rank(1), 3, added=True)
        until(lambda: len(sockets.known) == 3)
    stored = [event for _, event in sockets.events if isinstance(event, BlockStored)]
    assert b"".join(block for event in stored for block in event.block_hashes) == b"".join(hashes[:2] + hashes[3:])
    assert stored[0].parent_block_hash is None and stored[0].token_ids[:2] == [0, 1]
    assert (stored[-1].token_ids, stored[-1].parent_block_hash) == ([], None)  # nobody saw its tokens


def test_what_is_remembered_of_prompts_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CHUNKS_DESCRIBED", 3)
    monkeypatch.setattr(limits, "MAX_UNREAD_PROMPT_BYTES", 2 * (CHUNK_HASH_BYTES + 8))
    descriptions = Descriptions(CHUNK_TOKENS)
    for number in range(5):
        descriptions.note(b"", chunk_hash(number), array("I", [number, number]).tobytes())
        if number % 2:
            descriptions.take()
    descriptions.take()
    assert [number for number in range(5) if descriptions.of(chunk_hash(number)) is not None] == [2, 3, 4]
    for number in range(5, 8):  # two of them fit
        descriptions.note(b"", chunk_hash(number), bytes(8))
    descriptions.take()
    assert [number for number in range(8) if descriptions.of(chunk_hash(number)) is not None] == [4, 5, 6]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tcp://*:5557", Endpoint("tcp://0.0.0.0:5557", True, True)),
        ("tcp://[::]:5557", Endpoint("tcp://[::]:5557", True, True)),
        ("tcp://localhost:5557", Endpoint("tcp://127.0.0.1:5557", True, False)),
        ("tcp://router:5557", Endpoint("tcp://router:5557", False, False)),
        ("ipc:///run/events", Endpoint("ipc:///run/events", True, False)),
    ],
)
def test_endpoints(text: str, expected: Endpoint) -> None:
    assert parse_endpoint(text, "--kv-events-endpoint") == expected


@pytest.mark.parametrize("text", ["tcp://*", "tcp://*:0", "tcp://*:65536", "ipc://run", "inproc://events", "5557"])
def test_endpoints_that_are_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^--kv-events-endpoint .*(must be tcp://\*:PORT .*a port from 1 to 65535|must name)"
    ):
        parse_endpoint(text, "--kv-events-endpoint")


@pytest.fixture(params=[":", "."], ids=["IPv6", "IPv4"])
def own_endpoint(request: pytest.FixtureRequest) -> str:
    """At an address of this host that needs no zone, with a free port."""
    text = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout
    own = [host for host in text.split() if request.param in host and not host.startswith("fe80")]
    if not own:
        pytest.skip("this host has no such address but loopback")
    return tcp_endpoint(own[0], free_port())


def test_a_subscriber_may_listen_at_an_address_of_this_host(own_endpoint: str) -> None:
    endpoint = parse_endpoint(own_endpoint, "--kv-events-endpoint")
    with zmq.Context() as context, context.socket(zmq.SUB) as events:
        events.setsockopt(zmq.IPV6, 1)
        events.bind(own_endpoint)
        events.subscribe(b"")
        sockets = EventSockets(endpoint, None, SystemClock())
        try:
            until(lambda: sockets.publish("topic", [AllBlocksCleared()]) or events.poll(10))
        finally:
            sockets.close()
        assert events.recv_multipart()[0] == b"topic"


def test_what_was_missed_is_asked_for_at_an_address_of_this_host(own_endpoint: str) -> None:
    flag = "--kv-events-replay-endpoint"
    assert parse_replay_endpoint(own_endpoint, flag) == Endpoint(own_endpoint, True, True, True)
    here = parse_endpoint(f"tcp://127.0.0.1:{free_port()}", "")
    sockets = EventSockets(here, parse_replay_endpoint(own_endpoint, flag), SystemClock())
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.IPV6, 1)
            asking.connect(own_endpoint)
            asking.send_multipart((b"", bytes(8)))
            until(lambda: sockets.repeat(0.1) and asking.poll(0))
    finally:
        sockets.close()


@pytest.mark.parametrize("host", ["router", "a..b", "198.51.100.77", "2001:db8::77"])
def test_what_is_no_address_of_this_host(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a socket can be bound to any address."""
    monkeypatch.setattr(socket, "socket", Unbounded)
    text = tcp_endpoint(host, 5558)
    assert parse_endpoint(text, "") == Endpoint(text, False, False)
    with pytest.raises(ConfigError, match=r"^--kv-events-replay-endpoint tcp://.*:5558 is no address of this host: "):
        parse_replay_endpoint(text, "--kv-events-replay-endpoint")


class Unbounded(socket.socket):
    """As with the kernel's setting ip_nonlocal_bind."""

    def bind(self, address: Any) -> None:
        ip_freebind, ipv6_freebind = 15, 78
        is_ipv6 = self.family == socket.AF_INET6
        level, option = (socket.IPPROTO_IPV6, ipv6_freebind) if is_ipv6 else (socket.IPPROTO_IP, ip_freebind)
        self.setsockopt(level, option, 1)
        super().bind(address)


def test_an_address_that_is_taken_is_refused() -> None:
    endpoint = parse_endpoint(f"tcp://127.0.0.1:{free_port()}", "")
    first = EventSockets(endpoint, None, SystemClock())
    with pytest.raises(ResourceError, match=f"--kv-events-replay-endpoint {endpoint.address} cannot be used"):
        EventSockets(parse_endpoint(f"tcp://127.0.0.1:{free_port()}", ""), endpoint, SystemClock())
    first.close()
