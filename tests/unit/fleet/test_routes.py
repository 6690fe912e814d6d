"""The HTTP interface of a coordinator: who may ask, what is refused, what is answered."""

from __future__ import annotations

import io
import re
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from lmcache.core import limits
from lmcache.core.chunking import ChunkHasher
from lmcache.environment import SYSTEM
from lmcache.fleet import checkpoint, prefixes
from lmcache.fleet import messages as m
from lmcache.fleet.app import build_app, operations
from lmcache.fleet.events import EventIntake
from lmcache.fleet.fleet import Fleet
from lmcache.fleet.routes.base import RouteContext
from lmcache.fleet.settings import CoordinatorSettings
from lmcache.http.operation import Access
from lmcache.protocol.tokens import pack_tokens
from lmcache.telemetry.metrics import CoordinatorMetrics
from polling import until

TOKEN = "a token of an operator"
CHUNK_TOKENS = 4
TOKENS = list(range(12))
REGISTERED = {"instance_id": "a", "ip": "127.0.0.1", "http_port": 1, "mq_port": 5555, "p2p_advertised_url": "h:1"}


def hashes(tokens: list[int] = TOKENS) -> list[str]:
    hasher = ChunkHasher("blake3", CHUNK_TOKENS)
    packed = hasher.extend(hasher.root(b""), pack_tokens(tokens))
    return [packed[at : at + 32].hex() for at in range(0, len(packed), 32)]


def batch(seq: int, **fields: Any) -> dict[str, Any]:
    return {"instance_id": "a", "incarnation": 5, "seq": seq, "event_type": "store", "tier": "l1", **fields}


def entries(*names: str, model: str = "m", rank: int = 0) -> list[dict[str, Any]]:
    return [
        {"key": {"chunk_hash_hex": name, "model_name": model, "kv_rank": rank}, "size_bytes": 4096} for name in names
    ]


NUMBERED = list(enumerate(hashes(), 1))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    settings = CoordinatorSettings(chunk_size=CHUNK_TOKENS, metadata_path=str(tmp_path / "metadata"))
    fleet = Fleet(settings, lambda: TOKEN, SYSTEM)
    yield fleet
    fleet.stop()


@pytest.fixture
def here(fleet: Fleet) -> Iterator[TestClient]:
    """On the coordinator's host."""
    app = build_app(fleet, lambda: TOKEN, CoordinatorMetrics())
    with TestClient(app, client=("127.0.0.1", 4), base_url="http://localhost") as client:
        yield client
    app.state.close()


@pytest.fixture
def elsewhere(fleet: Fleet) -> Iterator[TestClient]:
    app = build_app(fleet, lambda: TOKEN, CoordinatorMetrics())
    with TestClient(app, client=("192.0.2.1", 4), base_url="http://coordinator.example") as client:
        yield client
    app.state.close()


def test_from_another_host_nobody_joins_reads_or_moves_anything(fleet: Fleet, elsewhere: TestClient) -> None:
    context = RouteContext(fleet)
    table = operations(context, None)
    context.close()
    public = {operation.path for operation in table if operation.access is Access.PUBLIC}
    assert public == {"/", "/healthz", "/metrics", "/openapi.json"}
    for operation in table:
        path = re.sub(r"\{\w+\}", "a", operation.open_path)
        for headers in ({}, {"Authorization": "Bearer another token of somebody"}):
            answer = elsewhere.request(operation.method, path, content=b"not even JSON", headers=headers)
            assert answer.status_code == (200 if operation.path in public else 403), operation
            assert headers or operation.path in public or "LMCACHE_ADMIN_TOKEN" in answer.json()["detail"]
        told = elsewhere.request(operation.method, path, headers={"Authorization": f"Bearer {TOKEN}"})
        assert told.status_code != 403, operation
    assert not fleet.instances.all()


def test_everything_but_reading_counts_as_a_change(fleet: Fleet) -> None:
    context = RouteContext(fleet)
    table = operations(context, None)
    context.close()
    reads = {"/directory/lookup", "/query_instance", "/lookup", "/health", "/check_finish", "/query_worker_info"}
    for operation in table:
        if operation.method != "GET":
            assert (operation.access is Access.READ) == (operation.path in reads), operation


def test_what_a_server_is_asked_for_names_who_does_not_have_it(here: TestClient) -> None:
    sentence = here.get("/healthcheck").json()["detail"]
    assert sentence == "There is nothing at /healthcheck of a coordinator; GET / lists what there is."


def test_a_server_whose_heartbeats_are_too_rare_is_said(here: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    for name, seconds in (("a", 29.9), ("b", "60"), ("c", 30)):
        here.post("/instances", json={**REGISTERED, "instance_id": name, "metadata": {"heartbeat_seconds": seconds}})
    (said,) = [record.getMessage() for record in caplog.records if "--instance-timeout" in record.getMessage()]
    assert said.startswith("c sends a heartbeat every 30 s, and is gone here after 30 s of silence: ")


def test_a_server_joins_lives_and_leaves(here: TestClient) -> None:
    assert here.put("/instances/a/heartbeat").status_code == 404
    assert here.post("/instances", json=REGISTERED).json() == {
        "instance_id": "a",
        "re_registered": False,
        "incarnation": 0,
        "event_transport": "http",
    }
    assert here.post("/instances", json=REGISTERED).json()["re_registered"] is True
    beat = here.put("/instances/a/heartbeat")
    assert (beat.status_code, beat.json()["status"]) == (200, "ok")
    assert (beat.json()["incarnation"], beat.json()["needs_resync"]) == (0, False)
    here.post("/instances", json={**REGISTERED, "metadata": {"rack": "5"}})
    (entry,) = here.get("/instances").json()["instances"]
    assert entry["metadata"] == {"rack": "5"}
    (brief,) = here.get("/instances", params={"detail": "brief"}).json()["instances"]
    assert brief["metadata"] == {} and brief["instance_id"] == "a"
    assert (entry["instance_id"], entry["p2p_advertised_url"], entry["mq_port"]) == ("a", "h:1", 5555)
    unnamed = here.post("/instances", json={"ip": "127.0.0.1", "http_port": 2}).json()["instance_id"]
    assert unnamed.startswith("instance-") and len(here.get("/instances").json()["instances"]) == 2
    assert here.put("/instances/a/heartbeat").json()["members"] != beat.json()["members"]
    for _ in range(2):
        assert here.delete("/instances/a").status_code == 204
    assert here.put("/instances/a/heartbeat").status_code == 404


def test_what_a_server_tells_of_itself_can_be_kept_in_a_checkpoint(fleet: Fleet, here: TestClient) -> None:
    """Beyond 64 bits nothing can: checkpoints of all servers would fail."""
    for number in (2**64, -(2**63) - 1, 10**30):
        refused = here.post("/instances", json={**REGISTERED, "metadata": {"deep": [number]}})
        assert refused.status_code == 400 and "metadata" in refused.json()["detail"]
    assert here.post("/instances", json={**REGISTERED, "metadata": {"deep": [2**64 - 1, -(2**63)]}}).status_code == 200
    checkpoint.write(io.BytesIO(), fleet.instances, fleet.intake)


def test_who_joined_with_the_token_is_replaced_with_it_alone(fleet: Fleet, here: TestClient) -> None:
    """The coordinator's token goes to who had it, and to nobody else on this host."""
    assert here.post("/instances", json=REGISTERED).status_code == 200
    assert not fleet.instances.find("a").has_token
    assert here.post("/instances", json=REGISTERED, headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert fleet.instances.find("a").has_token
    refused = here.post("/instances", json=REGISTERED)
    assert refused.status_code == 400 and "with the admin token" in refused.json()["detail"]


def columns(*names: str, **fields: Any) -> dict[str, Any]:
    scope = {"model_name": "m", "kv_rank": 0, "object_group_id": 0, "cache_salt": ""}
    sizes_bytes = array("Q", [4096] * len(names)).tobytes()
    return {**scope, "hashes": bytes.fromhex("".join(names)), "sizes_bytes": sizes_bytes, **fields}


def test_events_may_come_as_columns(here: TestClient) -> None:
    here.post("/instances", json=REGISTERED)
    first, second, third = hashes()

    def post(encode: Callable[[Any], bytes], *batches: dict[str, Any]) -> int:
        answer = here.post("/events", content=encode({"batches": batches}))
        assert answer.json() == {**answer.json(), "applied": len(batches), "stale": 0, "packed": True}, answer.text
        return int(here.get("/directory/stats").json()["placements"])

    packed = msgspec.msgpack.encode
    told = batch(1, objects=columns(first, second), entries=entries(third), namespace="77" * 32, world_size=1)
    assert post(packed, told) == 3
    found = here.post("/directory/lookup", json={"token_ids": TOKENS, "model_name": "m"}).json()["results"]
    assert [place["size_bytes"] for result in found for place in result["placements"]] == [4096] * 3
    assert {result["key"]["namespace"] for result in found} == {"77" * 32}
    gone = columns(first, sizes_bytes=b"")
    assert post(packed, batch(2, event_type="delete", objects=gone, namespace="77" * 32)) == 2
    accessed = batch(3, event_type="access", objects=columns(second), namespace="77" * 32)
    assert post(msgspec.json.encode, accessed, batch(4, objects=gone)) == 3  # bytes in base64


def test_a_few_events_are_taken_without_a_thread_where_nothing_else_is(
    fleet: Fleet, here: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[int] = []
    in_thread = RouteContext.in_thread

    async def noted(context: RouteContext, work: Callable[[], Any]) -> Any:
        handed.append(1)
        return await in_thread(context, work)

    here.post("/instances", json=REGISTERED)
    monkeypatch.setattr(RouteContext, "in_thread", noted)
    few, many = columns(*hashes()[:2]), columns(*[f"{number:064x}" for number in range(256)])
    for seq, (objects, count) in enumerate([(few, 0), (many, 1)], 1):
        assert here.post(
            "/events", content=msgspec.msgpack.encode({"batches": [batch(seq, objects=objects)]})
        ).is_success
        assert len(handed) == count
    monkeypatch.setattr(EventIntake, "is_idle", False)
    here.post("/events", content=msgspec.msgpack.encode({"batches": [batch(3, objects=few)]}))
    assert len(handed) == 2


@pytest.mark.parametrize("encode", [msgspec.json.encode, msgspec.msgpack.encode])
@pytest.mark.parametrize(
    "fields",
    [
        {"hashes": bytes(31)},
        {"sizes_bytes": bytes(15)},
        {"sizes_bytes": bytes(8)},
        {"kv_rank": -1},
        {"hashes": bytes(32 * (limits.MAX_FLEET_EVENT_ENTRIES + 1)), "sizes_bytes": b""},
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused(
    here: TestClient, encode: Callable[[Any], bytes], fields: dict[str, Any]
) -> None:
    here.post("/instances", json=REGISTERED)
    body = encode({"batches": [batch(1, objects=columns(*hashes()[:2], **fields))]})
    answer = here.post("/events", content=body)
    assert answer.status_code == 400 and "no list of batches" in answer.json()["detail"]
    assert here.get("/directory/stats").json()["batches_applied"] == 0


def test_events_are_found_by_key_and_by_prompt(here: TestClient) -> None:
    here.post("/instances", json=REGISTERED)
    first, second, third = hashes()
    answer = here.post("/events", json={"batches": [batch(1, entries=entries(first, second), ts=1.5)]}).json()
    assert answer == {"applied": 1, "duplicates": 0, "stale": 0, "resync": [], "incarnations": {}, "packed": True}
    disk = batch(2, tier="l2", backend="disk", entries=entries(first, third), shared=True)
    here.post("/events", json={"batches": [disk]})
    prompt = {"token_ids": [*TOKENS, 99], "model_name": "m"}
    found = here.post("/directory/lookup", json=prompt).json()
    assert found["chunks"] == 3
    tiers = [[place["tier"] for place in result["placements"]] for result in found["results"]]
    assert [sorted(names) for names in tiers] == [["l1", "l2"], ["l1"], ["l2"]]
    keys = [result["key"] for result in found["results"]]
    assert here.post("/directory/lookup", json={"keys": keys}).json()["results"] == found["results"]
    assert here.post("/directory/lookup", json={**prompt, "cache_salt": "t"}).json()["results"][0]["placements"] == []
    (place,) = found["results"][2]["placements"]
    assert place == {
        "instance_id": "a",
        "incarnation": 5,
        "tier": "l2",
        "backend": "disk",
        "size_bytes": 4096,
        "shared": True,
    }
    listed = here.get("/directory/keys", params={"tier": "l2", "limit": 1}).json()
    rest = here.get("/directory/keys", params={"tier": "l2", "offset": listed["next_offset"]}).json()
    assert {entry["key"]["chunk_hash_hex"] for entry in listed["keys"] + rest["keys"]} == {first, third}
    assert here.get("/directory/keys", params={"backend": "other"}).json() == {"keys": [], "next_offset": 0}
    layout = here.post("/lookup", json={"tokens": TOKENS, "event_id": "mine"}).json()
    assert layout == {"event_id": "mine", "layout_info": {"a": ["LocalDiskBackend", 12]}, "complete": True}
    usage = here.get("/instances/a/usage").json()["usage"]
    assert [(entry["tier"], entry["objects"], entry["used_bytes"]) for entry in usage] == [
        ("l1", 2, 8192),
        ("l2", 2, 8192),
    ]
    figures = here.get("/metrics").text
    assert "lmcache_mp_coordinator_placements 4.0" in figures
    assert "lmcache_mp_coordinator_keys 3.0" in figures
    assert "lmcache_mp_coordinator_instances 1.0" in figures
    assert "lmcache_mp_coordinator_entries_chunks_total 4.0" in figures
    assert float(figures.split("\nlmcache_mp_coordinator_directory_bytes ")[1].split()[0]) > 0
    assert 'lmcache_mp_coordinator_batches_total{outcome="applied"} 2.0' in figures


def test_numbers_of_batches(here: TestClient) -> None:
    """Once, in order; what is missing is asked for; what is older than the incarnation is not taken."""
    unknown = here.post("/events", json={"batches": [batch(1)]}).json()
    assert (unknown["stale"], unknown["resync"]) == (1, ["a"])
    here.post("/instances", json=REGISTERED)

    def told(*batches: dict[str, Any]) -> tuple[int, int, int, list[str]]:
        answer = here.post("/events", json={"batches": batches}).json()
        return answer["applied"], answer["duplicates"], answer["stale"], answer["resync"]

    (name, *_) = hashes()
    assert told(batch(1, entries=entries(name))) == (1, 0, 0, [])
    assert told(batch(1, entries=entries(name)), batch(2)) == (1, 1, 0, [])
    assert told(batch(4)) == (1, 0, 0, ["a"])  # 3 is missing
    assert told(batch(3)) == (0, 1, 0, ["a"])  # too late
    assert "lmcache_mp_coordinator_gaps_total 1.0" in here.get("/metrics").text
    assert told(batch(1, incarnation=4)) == (0, 0, 1, [])
    assert here.get("/directory/stats").json()["placements"] == 1
    assert told(batch(1, incarnation=6)) == (1, 0, 0, [])
    assert here.get("/directory/stats").json()["placements"] == 0  # a higher incarnation voids L1
    assert here.post("/instances", json=REGISTERED).json()["incarnation"] == 6
    marks = [batch(seq, incarnation=6, event_type="config", resync=mark) for seq, mark in ((2, "begin"), (3, "end"))]
    assert told(*marks) == (2, 0, 0, [])
    assert "lmcache_mp_coordinator_complete_resyncs_total 1.0" in here.get("/metrics").text


def test_what_a_fault_has_lost_is_asked_for(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it comes while an incarnation begins."""
    fleet.instances.register(m.RegisterRequest("127.0.0.1", 1, "a"))
    told = [m.Batch("a", 5, seq, "store", "l1", entries=[m.Entry(m.Key(name, "m", 0))]) for seq, name in NUMBERED]
    for step in ("store", "forget_l1"):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a fault"):
            patch.setattr(fleet.directory, step, faulty)
            fleet.intake.apply(told)
        assert fleet.intake.apply(told).resync == ["a"]
        assert fleet.intake.stream("a").needs_resync
        told = [m.Batch("a", 6, batch.seq, "store", "l1", entries=batch.entries) for batch in told]


def test_more_copies_than_are_shown(fleet: Fleet, here: TestClient) -> None:
    """Answers say that there are more, and have them where they are asked for. What is pinned or deleted is all of
    them, and a router is told of every server."""
    key = m.Key(hashes()[0], "m", 0)
    servers = [f"server-{number}" for number in range(limits.MAX_FLEET_COPIES_SHOWN + 1)]
    for name in servers[1:]:
        fleet.directory.store(name, "l1", "", False, [m.Entry(key)], "77" * 32)
    prompt = {"token_ids": TOKENS, "model_name": "m"}
    assert here.post("/directory/lookup", json=prompt).json()["results"][0]["complete"] is True
    fleet.directory.store(servers[0], "l1", "", False, [m.Entry(key)], "77" * 32)
    (first, second, _) = here.post("/directory/lookup", json=prompt).json()["results"]
    assert (len(first["placements"]), first["complete"]) == (limits.MAX_FLEET_COPIES_SHOWN, False)
    assert second["complete"]
    (first, *_) = here.post("/directory/lookup", json={**prompt, "copies": len(servers)}).json()["results"]
    assert {place["instance_id"] for place in first["placements"]} == {*servers} and first["complete"]
    refused = here.post("/directory/lookup", json={**prompt, "copies": limits.MAX_FLEET_COPIES_ASKED // 3 + 1})
    assert refused.status_code == 400 and '"copies"' in refused.json()["detail"]
    layout = here.post("/lookup", json={"tokens": TOKENS}).json()
    assert layout["layout_info"] == {name: ["LocalCPUBackend", CHUNK_TOKENS] for name in servers}
    assert layout["complete"] is True
    assert sorted(fleet.directory.names_by_instance([key])[0]) == sorted(servers)
    for name in servers:
        assert list(fleet.directory.names_by_instance([key], name)[0]) == [name]


def test_a_router_is_told_where_not_everything_was_looked_at(
    fleet: Fleet, here: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "_STEP_KEYS", 1)
    monkeypatch.setattr(limits, "MAX_FLEET_COPIES_EXAMINED", 1)
    fleet.directory.store("a", "l1", "", False, [m.Entry(m.Key(name, "m", 0)) for name in hashes()], "77" * 32)
    layout = here.post("/lookup", json={"tokens": TOKENS}).json()
    assert (layout["layout_info"], layout["complete"]) == ({"a": ["LocalCPUBackend", 2 * CHUNK_TOKENS]}, False)


def test_of_a_prompt_with_too_many_objects_a_router_is_told_the_beginning(fleet: Fleet, here: TestClient) -> None:
    ranks = limits.MAX_WORLD_SIZE // 8
    chunks = limits.MAX_HTTP_KEYS // ranks
    tokens = list(range((chunks + 2) * CHUNK_TOKENS))
    for rank in range(ranks):
        held = [m.Entry(m.Key(name, "m", rank)) for name in hashes(tokens)]
        fleet.directory.store("a", "l1", "", False, held, "77" * 32, world_size=ranks)
    answer = here.post("/lookup", json={"tokens": tokens})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["layout_info"], found["complete"]) == ({"a": ["LocalCPUBackend", chunks * CHUNK_TOKENS]}, False)
    assert here.post("/lookup", json={"tokens": tokens[: chunks * CHUNK_TOKENS]}).json()["complete"] is True


def test_servers_of_one_model_are_looked_at_for_their_own_ranks(here: TestClient) -> None:
    """One with more ranks hides no other, and what has a part of its ranks is not found."""
    first, second, third = hashes()

    def join(name: str, *told: dict[str, Any]) -> None:
        here.post("/instances", json={**REGISTERED, "instance_id": name})
        batches = [batch(seq, instance_id=name, **fields) for seq, fields in enumerate(told, 1)]
        assert here.post("/events", json={"batches": batches}).json()["applied"] == len(told)

    def rank(number: int, world_size: int, *names: str, **fields: Any) -> dict[str, Any]:
        namespace = f"{world_size:02}{number:02}" * 16
        return {
            "entries": entries(*names, rank=number),
            "namespace": namespace,
            "world_size": world_size,
            **fields,
        }

    join("alone", rank(0, 1, first, second, third))
    join("half", rank(0, 2, first, second, third), rank(1, 2, first))
    join("both", rank(0, 2, first, second), rank(1, 2, first, second), rank(0, 1, first))
    join("disk", rank(0, 2, first), rank(1, 2, first, tier="l2", backend="fs"))
    join("none", rank(1, 2, first, second, third))
    found = here.post("/lookup", json={"tokens": TOKENS}).json()["layout_info"]
    assert found == {
        "alone": ["LocalCPUBackend", 12],
        "both": ["LocalCPUBackend", 8],
        "half": ["LocalCPUBackend", 4],
        "disk": ["LocalDiskBackend", 4],
    }


def test_without_a_holder_nothing_is_forgotten(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.directory.store("a", "l1", "", False, [m.Entry(m.Key(hashes()[0], "m", 0))], "")
    for step in (fleet.directory.begin_resync, fleet.directory.forget_l1):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a fault"):
            patch.setattr(fleet.directory, "_holder", faulty)
            step("a")
        assert len(fleet.directory.list_keys("", "", "", 0, 10)[0]) == 1
    fleet.directory.forget("a")
    fleet.directory.check()


def test_beyond_the_places_that_a_directory_has_servers_are_refused_with_a_sentence(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """And what was told of the others is what it was."""
    directory, most = fleet.directory, 65_535
    of_each = limits.MAX_FLEET_PLACES_PER_INSTANCE
    entry = m.Entry(m.Key(hashes()[0], "m", 0))
    for name in ("last", "other"):
        fleet.instances.register(m.RegisterRequest("127.0.0.1", 1, name))
    directory.store("last", "l1", "", False, [entry], "")
    for number in range(most - 1):
        directory.set_capacity(f"server-{number // of_each}", "l2", f"backend-{number % of_each}", False, 1)
    answer = fleet.intake.apply([m.Batch("other", 1, 1, "store", "l1", entries=[entry])])
    assert (answer.applied, answer.resync) == (1, [])
    assert "65535 tiers and backends" in caplog.text and "of other" in caplog.text
    assert list(directory.names_by_instance([entry.key])[0]) == [] and directory.stats().records == 1
    assert fleet.intake.apply([m.Batch("last", 1, 1, "access", "l1")]).applied == 1  # a higher incarnation voids L1
    assert directory.stats().records == 0
    directory.forget("server-0")
    assert fleet.intake.apply([m.Batch("other", 1, 2, "store", "l1", entries=[entry])]).applied == 1
    assert directory.stats().records == 1
    directory.check()


def test_a_heartbeat_does_not_wait_for_a_batch(fleet: Fleet, here: TestClient) -> None:
    """Nor does one behind a request that waits for it."""
    here.post("/instances", json=REGISTERED)
    lock = fleet.intake._lock  # noqa: SLF001 - it is held while a batch is applied
    with ThreadPoolExecutor(2) as threads:
        with lock:
            shown = threads.submit(here.get, "/instances")
            joining = threads.submit(here.post, "/instances", json={**REGISTERED, "instance_id": "b"})
            until(lambda: fleet.instances.knows("b"))
            assert here.put("/instances/a/heartbeat").status_code == 200
            assert not shown.done() and not joining.done()
        assert shown.result().status_code == joining.result().status_code == 200


def faulty(*_: object, **__: object) -> None:
    raise RuntimeError("a fault")


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/events", {"batches": [batch(0)]}, "seq"),
        ("/events", {"batches": [batch(1, event_type="look")]}, "event_type"),
        ("/events", {"batches": [batch(1, entries=entries("xy"))]}, "chunk_hash_hex"),
        ("/events", {"batches": [{}]}, "instance_id"),
        ("/events", {"batches": [batch(1, entries=entries("ab" * 32 + "\n"))]}, "chunk_hash_hex"),
        ("/events", {"batches": [batch(1, namespace="ab" * 32 + "\n")]}, "namespace"),
        ("/instances", {**REGISTERED, "ip": "127.0.0.1\n"}, "ip"),
        ("/instances", {**REGISTERED, "instance_id": "a\n"}, "instance_id"),
        ("/directory/lookup", {"token_ids": [1] * 132, "model_name": "m", "world_size": 512}, "16896 objects"),
        ("/instances", {"http_port": 1}, "ip"),
        ("/instances", {**REGISTERED, "ip": "127.0.0.1/x?"}, "ip"),
        ("/instances", {**REGISTERED, "ip": "127.0.0.1:8080"}, "ip"),
        ("/instances", {**REGISTERED, "instance_id": "a/b"}, "instance_id"),
        ("/instances", {**REGISTERED, "metadata": {"k": "v" * 5000}}, "metadata"),
        ("/directory/lookup", {}, "either"),
        ("/directory/lookup", {"token_ids": [1]}, "model_name"),
        ("/cache/prefetches", {"instance_id": "x", "model_name": "m", "token_ids": [1]}, "'x'"),
        ("/cache/pins", {"token_ids": TOKENS, "model_name": "m"}, "nothing to pin"),
        ("/cache/moves", {"source": "a", "target": "a", "model_name": "m", "token_ids": [1]}, "'a'"),
        ("/clear", {"instance_id": "a", "location": "Nowhere"}, "LocalCPUBackend"),
        ("/compress", {"instance_id": "x", "method": "zstd", "tokens": TOKENS}, "'x'"),
        (
            "/compress",
            {"instance_id": "x", "method": "zstd", "tokens": TOKENS, "location": "LocalDiskBackend"},
            "from which a prompt is compressed, got 'LocalDiskBackend'",
        ),
        ("/pin", {"instance_id": "x", "tokens": TOKENS}, "'x'"),
        ("/query_worker_info", {"instance_id": "x"}, "'x'"),
        ("/health", {"instance_id": "x"}, "'x'"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_sentence(
    here: TestClient, path: str, body: dict[str, Any], said: str
) -> None:
    answer = here.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["detail"], answer.text


def test_additional_fields_of_other_servers_are_passed_over(here: TestClient) -> None:
    here.post("/instances", json=REGISTERED)
    answer = here.post("/events", json={"batches": [batch(1, newer="field")], "more": 1})
    assert answer.json()["applied"] == 1


def test_a_model_is_asked_for_where_there_are_several(fleet: Fleet, here: TestClient) -> None:
    assert here.post("/lookup", json={"tokens": TOKENS}).json()["layout_info"] == {}
    here.post("/instances", json=REGISTERED)
    first, *_ = hashes()
    both = [batch(1, entries=entries(first)), batch(2, entries=entries(first, model="other"))]
    here.post("/events", json={"batches": both})
    refused = here.post("/lookup", json={"tokens": TOKENS})
    assert refused.status_code == 400 and "m, other" in refused.json()["detail"]
    layout = here.post("/lookup", json={"tokens": TOKENS, "model_name": "other"}).json()["layout_info"]
    assert layout == {"a": ["LocalCPUBackend", CHUNK_TOKENS]}
    here.delete("/instances/a")
    fleet.directory.sweep()
    fleet.directory.refresh_models()
    assert here.post("/lookup", json={"tokens": TOKENS}).json()["layout_info"] == {}


def test_every_rank_must_have_a_chunk(here: TestClient) -> None:
    here.post("/instances", json=REGISTERED)
    first, second, _ = hashes()
    told = [batch(1, entries=entries(first, second)), batch(2, entries=entries(first, rank=1))]
    here.post("/events", json={"batches": told})
    assert here.post("/lookup", json={"tokens": TOKENS}).json()["layout_info"] == {
        "a": ["LocalCPUBackend", CHUNK_TOKENS]
    }


def test_who_is_where(here: TestClient) -> None:
    assert here.post("/query_instance", json={"ip": "127.0.0.1", "event_id": "e"}).json() == {
        "event_id": "e",
        "instance_id": None,
    }
    here.post("/instances", json=REGISTERED)
    assert here.post("/query_instance", json={"ip": "127.0.0.1"}).json()["instance_id"] == "a"
    (worker,) = here.get("/controller/workers").json()["workers"]
    assert (worker["instance_id"], worker["ip"], worker["port"]) == ("a", "127.0.0.1", 5555)
    assert here.post("/query_worker_info", json={"instance_id": "a"}).json()["worker_infos"] == [worker]
    health = here.post("/health", json={"instance_id": "a"}).json()  # nothing listens there
    assert health["error_codes"] == {"0": -1} and "127.0.0.1:1" in health["reason"]
    assert here.get("/controller/key-stats").json() == {"total_keys": 0, "keys_by_instance": {"a": 0}}
    assert here.post("/check_finish", json={"event_id": "none"}).status_code == 404


def test_quotas_outlive_the_coordinator(here: TestClient, fleet: Fleet) -> None:
    assert here.put("/quota/tenant", json={"limit_gb": 1.5}).json()["limit_gb"] == 1.5
    assert here.put("/quota/_default", json={"limit_gb": 2}).json()["cache_salt"] == "_default"
    assert here.delete("/quota/_default").json()["exists"] is False
    again = Fleet(fleet.settings, lambda: TOKEN, SYSTEM)
    assert [(quota.cache_salt, quota.limit_bytes) for quota in again.quotas.all()] == [("tenant", 3 << 29)]
    again.stop()
    assert here.get("/quota/config").json()["enforced_by"]
    assert here.put("/quota/tenant", json={"limit_gb": -1}).status_code == 400


def test_a_quota_is_told_at_once(here: TestClient, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(fleet.servers, "ask", lambda *words: told.append(words))
    here.post("/instances", json=REGISTERED)
    here.put("/quota/tenant", json={"limit_gb": 2})
    until(lambda: told == [("a", "PUT", "/quota/tenant", {"limit_gb": 2.0})])  # without a round of the coordinator
    until(lambda: here.get("/quota/tenant").json()["behind"] == [])


def test_the_document_of_the_interface_names_every_operation(here: TestClient) -> None:
    document = here.get("/openapi.json").json()
    assert "/instances/{instance_id}/heartbeat" in document["paths"]
    assert document["info"]["title"] == "LMCache coordinator"
    assert "POST /events" in here.get("/").text
