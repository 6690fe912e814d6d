"""The events that routers get: the engine's own names of its blocks, tier by tier, as the server's chunks come and go.

The server's side is the real one over a real L1; requests and their hashes are vLLM's."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    hash_block_tokens,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.request import Request

from lmcache.client.engine_environment import EngineEnvironment
from lmcache.core.key import Namespace
from lmcache.core.key_batch import ChunkHashes
from lmcache.errors import LMCacheError, RemoteError, ServerUnavailable
from lmcache.integration.engine.announced_chunks import AnnouncedChunks
from lmcache.integration.vllm import versions
from lmcache.integration.vllm.kv_event_maker import EventMaker, EventOptions, NamedChunks
from lmcache.integration.vllm.kv_events import KVEvents
from lmcache.protocol import messages as m
from lmcache.protocol.tokens import pack_tokens
from manual_clock import ManualClock
from seeds import SEED
from unit.integration.vllm.fakes import hello
from unit.service.support import CHUNK_TOKENS, LAYOUT, SERVER_EPOCH, Service, a_service
from unit.service.test_chunk_changes import FakeRunner, use

pytestmark = pytest.mark.engine

BLOCK_TOKENS = 2
PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS
EVENTS = versions.installed_events()

init_none_hash(sha256)


def a_request(tokens: list[int], *, block_tokens: int = BLOCK_TOKENS, **fields: Any) -> Request:
    return Request(
        "r",
        tokens,
        SamplingParams(max_tokens=1),
        None,
        block_hasher=get_request_block_hasher(block_tokens, sha256),
        **fields,
    )


@dataclass
class LocalClient:
    """Calls the service as if it was a server."""

    service: Service
    hello: m.HelloReply = field(default_factory=lambda: hello(SERVER_EPOCH, CHUNK_TOKENS))
    fault: LMCacheError | None = None
    calls: list[m.ChunkChanges] = field(default_factory=list)

    def call(self, method: str, message: m.ChunkChanges, timeout_seconds: float) -> m.ChunkChangesReply:
        assert method == "chunk_changes"
        self.calls.append(message)
        if self.fault is not None:
            raise self.fault
        return self.service.changes.chunk_changes(message)


class Engine:
    """The events' thread by hand, and what a router makes of them."""

    def __init__(
        self, service: Service, *, group: int = 0, most_chunks: int = 1000, events: Any = EVENTS, **options: Any
    ) -> None:
        assert events is not None
        self.service = service
        self.client = LocalClient(service)
        self.maker = EventMaker(
            self.client,  # type: ignore[arg-type]
            "engine",
            EventOptions(block_tokens=BLOCK_TOKENS, group=group, **options),
            events,
            now=service.clock.monotonic,
            chunks=AnnouncedChunks(most_chunks),
        )
        self.blocks: dict[tuple[str, Any], Any] = {}  # that the router believes in, by medium and hash
        self.events: list[Any] = []

    def remember(self, request: Request, first: int = 0, *, hashed_tokens: int = BLOCK_TOKENS) -> None:
        hashes = ChunkHashes(self.service.hashes(pack_tokens(request.prompt_token_ids)))
        salt = request.cache_salt or ""
        self.maker.remember(NamedChunks(request, salt, hashes, first, len(hashes), CHUNK_TOKENS), hashed_tokens)

    def follow(self) -> list[Any]:
        """All that is new."""
        calls = 0
        while self.maker.poll():
            calls += 1
            assert calls < 50, "it is told of changes without end"
        events = list(self.maker.events())
        for event in events:
            for number, block in enumerate(event.block_hashes):
                if isinstance(event, BlockStored):
                    parent = event.block_hashes[number - 1] if number else event.parent_block_hash
                    self.blocks[event.medium, block] = parent
                else:
                    del self.blocks[event.medium, block]
        self.events += events
        return events

    def believed(self, medium: str = "CPU") -> set[Any]:
        return {block for of, block in self.blocks if of == medium}


def store(service: Service, tokens: list[int], salt: str = "") -> None:
    service.store(pack_tokens(tokens), salt=salt)


def external(request: Request, first_chunk: int = 0, end_chunk: int | None = None) -> list[Any]:
    end = None if end_chunk is None else end_chunk * PER_CHUNK
    return [maybe_convert_block_hash(block) for block in request.block_hashes[first_chunk * PER_CHUNK : end]]


TOKENS = list(range(100, 100 + 3 * CHUNK_TOKENS))


@pytest.fixture
def service() -> Iterator[Service]:
    with a_service(with_l2=True) as made:
        made.storage.runners = [FakeRunner(), FakeRunner(shared=True)]
        made.register()
        use(made, "", "tenant")
        yield made


def test_a_stored_prompt_is_one_event_in_the_engines_terms(service: Service) -> None:
    engine, request = Engine(service), a_request(TOKENS)
    engine.remember(request)
    assert engine.follow() == []
    store(service, TOKENS)
    (event,) = engine.follow()
    assert isinstance(event, BlockStored)
    assert event.block_hashes == external(request) and len(event.block_hashes) == 3 * PER_CHUNK
    assert (event.parent_block_hash, event.token_ids, event.block_size) == (None, TOKENS, BLOCK_TOKENS)
    assert (event.medium, event.group_idx, event.extra_keys, event.lora_id) == ("CPU", 0, None, None)
    # As vLLM computes them, from tokens and the block before.
    parent = None
    for number, block in enumerate(request.block_hashes):
        parent = hash_block_tokens(sha256, parent, TOKENS[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS])
        assert block == parent
    assert engine.follow() == []


def test_what_leaves_is_removed_and_what_comes_back_has_its_parent(service: Service) -> None:
    engine, request = Engine(service), a_request(TOKENS)
    engine.remember(request)
    store(service, TOKENS)
    engine.follow()
    hashes = service.hashes(pack_tokens(TOKENS))
    digest = Namespace("model", 1, 0, 0, LAYOUT, "").digest
    service.l1.core.remove(digest * 2, hashes[32:96])
    (event,) = engine.follow()
    assert isinstance(event, BlockRemoved)
    assert (event.block_hashes, event.medium, event.group_idx) == (external(request, 1), "CPU", 0)
    store(service, TOKENS)
    (event,) = engine.follow()
    assert event.block_hashes == external(request, 1)
    assert event.parent_block_hash == external(request, 0, 1)[-1]
    assert event.token_ids == TOKENS[CHUNK_TOKENS:]
    assert engine.believed() == set(external(request))


def test_blocks_that_two_chunks_share_stay_until_both_have_gone(service: Service) -> None:
    digest = Namespace("model", 1, 0, 0, LAYOUT, "").digest
    first, second = a_request(TOKENS[:CHUNK_TOKENS]), a_request([*TOKENS[: CHUNK_TOKENS - BLOCK_TOKENS], 1, 2])
    engine = Engine(service)
    for request in (first, second):
        engine.remember(request)
        store(service, request.prompt_token_ids)
        engine.follow()
    assert len(engine.believed()) == PER_CHUNK + 1
    service.l1.core.remove(digest, service.hashes(pack_tokens(first.prompt_token_ids)))
    (event,) = engine.follow()
    assert event.block_hashes == external(first)[-1:]
    assert engine.believed() == set(external(second))
    service.l1.core.remove(digest, service.hashes(pack_tokens(second.prompt_token_ids)))
    engine.follow()
    assert engine.believed() == set()


def test_chunks_that_are_there_before_they_are_seen_are_announced(service: Service) -> None:
    store(service, TOKENS)
    engine, request = Engine(service), a_request(TOKENS)
    engine.remember(request)
    engine.follow()
    assert engine.believed() == set(external(request))
    longer = a_request([*TOKENS, *range(CHUNK_TOKENS)])
    engine.remember(longer)  # the rest is known
    engine.follow()
    assert engine.believed() == set(external(request))
    store(service, longer.prompt_token_ids)
    (event,) = engine.follow()
    assert event.block_hashes == external(longer, 3)


def test_the_tiers_are_told_apart_and_shared_adapters_are_left_out(service: Service) -> None:
    own, shared = service.storage.runners
    request = a_request(TOKENS[:CHUNK_TOKENS])
    (chunk_hash,) = [service.hashes(pack_tokens(request.prompt_token_ids))]
    engine, all_l2 = Engine(service), Engine(service, shared_l2=True)
    for follower in (engine, all_l2):
        follower.remember(request)
        follower.follow()
    key = own.stored(chunk_hash)
    store(service, request.prompt_token_ids)
    media = [event.medium for event in engine.follow()]
    assert media == ["CPU", "STORAGE"]
    all_l2.follow()
    shared.stored(chunk_hash)
    own.native.lost([key])
    (event,) = engine.follow()
    assert isinstance(event, BlockRemoved) and event.medium == "STORAGE"
    assert all_l2.follow() == []  # the last copy of the tier has not gone
    assert all_l2.believed("STORAGE") == engine.believed("CPU") == set(external(request))


def test_salt_and_adapter_are_in_the_events_as_vllm_puts_them_there(service: Service) -> None:
    lora = LoRARequest("summaries", 7, "/adapters/summaries")
    request = a_request(TOKENS, cache_salt="tenant", lora_request=lora)
    engine = Engine(service)
    engine.remember(request)
    store(service, TOKENS, salt="tenant")
    (event,) = engine.follow()
    assert event.block_hashes == external(request) != external(a_request(TOKENS))
    assert (event.lora_id, event.lora_name) == (7, "summaries")
    assert event.extra_keys == [("summaries", "tenant"), *[("summaries",)] * (3 * PER_CHUNK - 1)]


def test_requests_that_name_parts_of_blocks_get_the_names_of_whole_ones(service: Service) -> None:
    request, whole = a_request(TOKENS, block_tokens=1), a_request(TOKENS)
    engine = Engine(service)
    engine.remember(request, hashed_tokens=1)
    store(service, TOKENS)
    (event,) = engine.follow()
    assert event.block_hashes == [maybe_convert_block_hash(block) for block in request.block_hashes[1::2]]
    assert len(event.block_hashes) == len(whole.block_hashes)


def test_a_server_that_restarts_takes_back_what_the_last_one_had(service: Service) -> None:
    engine, request = Engine(service), a_request(TOKENS)
    engine.remember(request)
    store(service, TOKENS)
    engine.follow()
    service.l1.core.clear()
    store(service, TOKENS[:CHUNK_TOKENS])  # of which no change is read
    engine.client.hello = hello(SERVER_EPOCH, CHUNK_TOKENS)
    removed, *stored = engine.follow()
    assert isinstance(removed, BlockRemoved) and removed.block_hashes == external(request)
    assert [type(event) for event in stored] == [BlockStored]
    assert engine.believed() == set(external(request, 0, 1))


def test_a_server_that_stays_away_is_taken_back_and_announced_again(service: Service) -> None:
    engine, request = Engine(service), a_request(TOKENS)
    engine.remember(request)
    store(service, TOKENS)
    engine.follow()
    engine.client.fault = ServerUnavailable("away")
    assert engine.follow() == []
    service.clock.advance(11.0)
    assert [type(event) for event in engine.follow()] == [BlockRemoved]
    engine.client.fault = None
    engine.follow()
    assert engine.believed() == set(external(request))


def test_a_server_without_the_call_is_asked_once(service: Service) -> None:
    engine = Engine(service)
    engine.remember(a_request(TOKENS))
    engine.client.fault = RemoteError(m.ErrorCode.UNKNOWN_METHOD, "no such method")
    engine.follow()
    engine.follow()
    assert len(engine.client.calls) == 1


def test_beyond_its_limit_the_oldest_is_forgotten_and_taken_back(service: Service) -> None:
    engine = Engine(service, most_chunks=4)
    first, second = a_request(TOKENS), a_request([7, *TOKENS])
    for request in (first, second):
        engine.remember(request)
        store(service, request.prompt_token_ids)
        engine.follow()
    assert engine.believed() == {*external(first, 0, 1), *external(second, 0, 3)}  # the beginning goes last
    engine.remember(first)
    engine.follow()
    assert set(external(first)) <= engine.believed() and len(engine.believed()) == 4 * PER_CHUNK
    engine.maker.poll()
    assert service.sample("kv_events_skipped_chunks_total", reason="no_room") == 4


def test_changes_of_chunks_that_were_never_seen_are_counted(service: Service) -> None:
    engine = Engine(service)
    engine.remember(a_request(TOKENS))
    engine.follow()
    store(service, [5] * CHUNK_TOKENS)
    assert engine.follow() == []
    engine.maker.poll()
    assert service.sample("kv_events_skipped_chunks_total", reason="unknown") == 1


def test_after_lost_changes_everything_is_asked_for_again(service: Service) -> None:
    engine, request = Engine(service), a_request(TOKENS)
    engine.remember(request)
    store(service, TOKENS)
    engine.follow()
    service.register_worker("engine", 0)  # its worker starts anew
    engine.follow()
    assert engine.believed() == set()  # until a request has been seen
    service.l1.core.clear()
    store(service, TOKENS[:CHUNK_TOKENS])
    engine.follow()
    assert engine.believed() == set(external(request, 0, 1))


def test_the_engines_own_reset_and_new_weights(service: Service) -> None:
    engine, request = Engine(service), a_request(TOKENS)
    engine.remember(request)
    store(service, TOKENS)
    engine.follow()
    engine.blocks.clear()  # routers take AllBlocksCleared for everything of this worker
    engine.maker.announce_again()
    engine.follow()
    assert engine.believed() == set(external(request))
    engine.maker.forget_all()
    engine.follow()
    assert engine.believed() == set()
    store(service, TOKENS[:CHUNK_TOKENS])
    assert engine.follow() == []


def test_a_fault_of_one_event_loses_that_one_alone(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    assert EVENTS is not None
    faults: list[Exception] = []

    def stored(**fields: Any) -> BlockStored:
        if faults:
            raise faults.pop()
        return BlockStored(**fields)

    engine = Engine(service, events=dataclasses.replace(EVENTS, stored=stored))
    prompts = [TOKENS, [1] * CHUNK_TOKENS, [2] * CHUNK_TOKENS]
    requests = [a_request(prompt) for prompt in prompts]
    for request, prompt in zip(requests, prompts, strict=True):
        engine.remember(request)
        store(service, prompt)
    faults.append(MemoryError())
    assert len(engine.follow()) == 2
    assert caplog.text.count("A KV event of") == 1
    (lost,) = [request for request in requests if not set(external(request)) <= engine.believed()]
    engine.maker.announce_again()
    engine.follow()
    assert engine.believed() == {block for request in requests for block in external(request)}
    # What was never announced is not taken back, and takes nothing else with it.
    another = a_request([3] * CHUNK_TOKENS)
    engine.remember(another)
    store(service, [3] * CHUNK_TOKENS)
    faults.append(MemoryError())
    assert engine.follow() == []
    service.l1.core.clear()
    engine.follow()
    assert engine.believed() == set()
    assert not set(external(another)) & {block for event in engine.events for block in event.block_hashes}
    store(service, lost.prompt_token_ids)
    engine.follow()
    assert engine.believed() == set(external(lost))


def test_a_random_history_ends_with_what_is_there(service: Service) -> None:
    rng = random.Random(SEED)
    engine = Engine(service, most_chunks=30)
    prompts = [[number] * (CHUNK_TOKENS * rng.randint(1, 5)) for number in range(12)]
    requests = [a_request(prompt) for prompt in prompts]
    for _ in range(400):
        number = rng.randrange(len(prompts))
        act = rng.randrange(10)
        if act < 4:
            store(service, prompts[number])
        elif act < 7:
            engine.remember(requests[number])
        elif act == 7:
            service.l1.core.evict(8192 * rng.randint(1, 4))
        elif act == 8 and rng.random() < 0.1:
            service.l1.core.clear()
        engine.follow()
    for request in requests[-3:]:
        engine.remember(request)
    engine.follow()
    digest = Namespace("model", 1, 0, 0, LAYOUT, "").digest
    for request in requests[-3:]:
        hashes = service.hashes(pack_tokens(request.prompt_token_ids))
        resident = service.l1.core.resident_in_all(digest, hashes)
        for chunk, is_there in enumerate(resident):
            assert (set(external(request, chunk, chunk + 1)) <= engine.believed()) == bool(is_there)


# ---- the thread -----------------------------------------------------------------------------------------------------
def tracked(service: Service, request: Request, server: m.HelloReply) -> Any:
    session = SimpleNamespace(
        server=server,
        hashes=ChunkHashes(service.hashes(pack_tokens(request.prompt_token_ids))),
        cache_salt="",
    )
    return SimpleNamespace(request=request, session=session, noted_at=None, noted_chunks=0)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    waiting = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError("not so in time")


def test_the_scheduler_thread_notes_and_takes(service: Service) -> None:
    assert EVENTS is not None
    client, request = LocalClient(service), a_request(TOKENS)
    options = EventOptions(block_tokens=BLOCK_TOKENS, group=0)
    # By a clock that stands still the moment that it goes on for what is expected never ends.
    environment = EngineEnvironment(ManualClock())
    events = KVEvents(client, "engine", options, EVENTS, environment)  # type: ignore[arg-type]
    try:
        events.bind(SimpleNamespace(hash_block_size=BLOCK_TOKENS))
        noted = tracked(service, request, client.hello)
        events.note(noted, 2)
        events.note(noted, 2)
        assert not events.is_pending
        store(service, TOKENS[: 2 * CHUNK_TOKENS])
        events.expect("", noted.session.hashes[1])
        assert events.is_pending
        taken: list[Any] = []
        until(lambda: bool(taken.extend(events.take()) or taken))
        assert [block for event in taken for block in event.block_hashes] == external(request, 0, 2)
        until(lambda: not events.is_pending)
        request.resumable = True  # what it says may be replaced
        events.note(noted, 3)
        assert noted.noted_chunks == 2
    finally:
        events.close()


class SlowRequest:
    """A request whose blocks have their names when the test says so."""

    def __init__(self, request: Request) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._request = request

    @property
    def block_hashes(self) -> Any:
        self.reached.set()
        assert self.go_on.wait(60.0)
        return self._request.block_hashes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def test_what_is_named_after_new_weights_is_remembered_whatever_the_thread_does_meanwhile(service: Service) -> None:
    assert EVENTS is not None
    client, old, new = LocalClient(service), [7] * CHUNK_TOKENS, [8] * CHUNK_TOKENS
    slow, request = SlowRequest(a_request(old)), a_request(new)
    options = EventOptions(block_tokens=BLOCK_TOKENS, group=0)
    environment = EngineEnvironment(ManualClock())
    events = KVEvents(client, "engine", options, EVENTS, environment)  # type: ignore[arg-type]
    store(service, old)
    store(service, new)
    try:
        events.note(tracked(service, slow, client.hello), 1)
        assert slow.reached.wait(60.0)
        events.renamed()
        events.note(tracked(service, request, client.hello), 1)
        slow.go_on.set()
        taken: list[Any] = []
        until(lambda: bool(taken.extend(events.take()) or taken))
        assert [block for event in taken for block in event.block_hashes] == external(request)
    finally:
        slow.go_on.set()
        events.close()


# ---- what engines offer, and what the guide says ---------------------------------------------------------------------
def test_engines_whose_events_name_no_tier_publish_none_of_the_server() -> None:
    class Old(m.Message):
        block_hashes: list[int]
        parent_block_hash: int | None
        token_ids: list[int]
        block_size: int

    cache = SimpleNamespace(maybe_convert_block_hash=bytes)
    assert versions.event_interface(SimpleNamespace(BlockStored=Old, BlockRemoved=Old), cache) is None
    assert versions.event_interface(SimpleNamespace(), cache) is None
    current = SimpleNamespace(BlockStored=BlockStored, BlockRemoved=BlockRemoved)
    assert versions.event_interface(current, SimpleNamespace()) is None
    offered = versions.event_interface(current, cache)
    assert offered is not None and "extra_keys" in offered.fields


def test_the_guide_turns_events_on() -> None:
    text = (Path(__file__).parents[4] / "docs" / "how-to" / "route_by_kv.md").read_text()
    (settings,) = re.findall(r"--kv-events-config '(\{.*\})'", text)
    config = KVEventsConfig(**json.loads(settings))
    assert versions.publishes_events(SimpleNamespace(kv_events_config=config))
    assert not versions.publishes_events(SimpleNamespace(kv_events_config=None))
    (block_tokens,) = set(re.findall(r"--(?:kv-event-)?block-size (\d+)", text))
    assert 256 % int(block_tokens) == 0
