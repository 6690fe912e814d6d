"""`lmcache query --coordinator`: what is asked and shown. `lmcache coordinator`: what it refuses."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from lmcache.cli import query_fleet, quota
from lmcache.cli.main import main
from lmcache.errors import ServerUnavailable


def result(*places: tuple[str, str, str]) -> dict[str, Any]:
    shown = [{"instance_id": name, "tier": tier, "backend": backend} for name, tier, backend in places]
    return {"key": {"chunk_hash_hex": "ab" * 32}, "placements": shown}


def test_a_chunk_is_where_all_its_ranks_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    a, disk, b = ("a", "l1", ""), ("a", "l2", "disk"), ("b", "l1", "")
    results = [result(a, b), result(a, disk), result(disk), result(disk, b), result(b), result(b)]

    def answer(url: str, method: str, path: str, body: Any, **_: Any) -> Any:
        asked.append((url, method, path, body))
        partials = [
            {"tokens": 2, "results": [result(a), result(a, b)]},
            {"tokens": 1, "results": [result(a), result(b)]},
        ]
        return {"chunks": 3, "results": results, "chunk_tokens": 4, "partial_chunks": partials}

    monkeypatch.setattr(query_fleet, "request", answer)
    words = ["query", "--coordinator", "http://c:9300", "--model", "m", "--world-size", "2", "--tokens", "1,2,3"]
    assert main([*words, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["metrics"]
    body = {"token_ids": [1, 2, 3], "model_name": "m", "world_size": 2, "cache_salt": ""}
    assert asked == [("http://c:9300", "POST", "/directory/lookup", body)]
    assert [part["tiers"] for part in found["ranges"]] == [["a l1"], ["a disk"], ["b l1"]]
    assert found["partial_chunks"] == [{"hash": "ab" * 32, "tiers": ["a l1"], "tokens": 2}]
    assert (found["prefix_chunks"], found["hit_tokens"]) == (2, 8)  # a has two; b has the third alone


@pytest.mark.parametrize(
    ("words", "said"), [(["--tokens", "1"], "--model"), (["--text", "a", "--model", "m"], "tokens")]
)
def test_what_it_needs(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["query", "--coordinator", "http://c:9300", *words]) == 2
    assert said in capsys.readouterr().err


def fleet_answer(**more: Any) -> dict[str, Any]:
    server = {"url": "http://10.0.0.1:8080", "joined_seconds": 90.0, "silent_seconds": 1.5, "l1_objects": 4}
    server |= {"l1_used_bytes": 3 << 30, "l1_capacity_bytes": 6 << 30, "l2_objects": 70}
    servers = [
        {"instance_id": "b", **server, "told": "resync", "behind": ["pins"]},
        {"instance_id": "a", **server, "told": "everything", "behind": []},
    ]
    told = {"coordinator": "", "instance_id": "", "joined": True, "problem": "", "age_seconds": 0.0}
    return {"servers": servers, "instance_timeout_seconds": 30.0, **told, **more}


def test_servers_of_a_fleet_are_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []

    def answer(*words: Any, **_: Any) -> Any:
        asked.append(words)
        away = {"coordinator": "http://c:9300", "instance_id": "a", "problem": "nothing answers", "age_seconds": 60.0}
        return fleet_answer(**away) if words[0] == "http://s:8080" else fleet_answer()

    monkeypatch.setattr(query_fleet, "request", answer)
    assert main(["query", "--servers", "--coordinator", "http://c:9300"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    row = ["http://10.0.0.1:8080", "1.5", "s", "ago", "3.0", "GiB", "of", "6.0", "GiB", "4", "70"]
    assert ["a", *row, "-"] in rows and ["b", *row, "resyncing,", "pins", "behind"] in rows
    assert "Coordinator:" not in {words[0] for words in rows if words}
    assert main(["query", "--servers", "--url", "http://s:8080"]) == 0
    out = capsys.readouterr().out
    assert "nothing answers\n" in out and "1 min 1 s ago" in out
    assert asked == [("http://c:9300", "GET", "/fleet"), ("http://s:8080", "GET", "/fleet")]


def test_a_coordinator_that_never_answered_is_no_empty_fleet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    away = fleet_answer(servers=[], coordinator="http://c:9300", problem="nothing answers at http://c:9300.")
    monkeypatch.setattr(query_fleet, "request", lambda *_, **__: away)
    assert main(["query", "--servers"]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == (
        "",
        1,
    ) and "cannot be asked: nothing answers at http://c:9300." in said.err


def fleet_quota(**more: Any) -> dict[str, Any]:
    return {"cache_salt": "s", "limit_gb": 5.0, "current_usage_gb": 7.5, "exists": True, "behind": [], **more}


def test_quotas_of_a_fleet_are_those_of_each_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [fleet_quota(), fleet_quota(cache_salt="t", limit_gb=0.0, exists=False)]
    monkeypatch.setattr(
        quota, "request", lambda _, method, path, *__, **___: {"quotas": entries} if path == "/quota" else entries[0]
    )
    assert main(["quota", "list", "--url", "http://c:9300"]) == 0
    _, *rows, _ = capsys.readouterr().out.splitlines()
    assert [row.split(maxsplit=1) for row in rows] == [
        ["s:", "7.500 GB on all servers and tiers, 5.000 GB each"],
        ["t:", "7.500 GB on all servers and tiers, 0 GB each (none set)"],
    ]
    assert main(["quota", "list", "--url", "http://c:9300", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == {"quotas": entries}
    assert main(["quota", "get", "s", "--url", "http://c:9300"]) == 0
    shown = r"Limit for each server: +5.000 GB\nTakes on all servers and tiers: +7.500 GB\nWas set: +yes\n"
    assert re.search(shown + "Still being told: +nobody\n", capsys.readouterr().out)


@pytest.mark.parametrize("words", [("set", "s", "5"), ("delete", "s")])
def test_a_quota_of_a_fleet_is_shown_when_all_servers_have_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    def shown(*answers: object, timeout: str = "10") -> str:
        left = iter(answers)

        def answer(*_: Any, **__: Any) -> Any:
            found = next(left, answers[-1])
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(quota, "request", answer)
        assert main(["quota", *words, "--url", "http://c:9300", "--timeout", timeout]) == 0
        return capsys.readouterr().out.splitlines()[-2]

    all_behind, last = fleet_quota(behind=["a", "b"]), fleet_quota(behind=["b"])
    assert re.fullmatch("Still being told: +nobody", shown(all_behind, last, fleet_quota()))
    assert re.fullmatch("Still being told: +b", shown(all_behind, last, timeout="0.2"))
    assert re.fullmatch("Still being told: +a, b", shown(all_behind, ServerUnavailable("gone")))


def test_servers_of_a_fleet_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(query_fleet, "request", lambda *_, **__: fleet_answer())
    assert main(["query", "--servers", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["metrics"]
    assert [server["instance_id"] for server in found["servers"]] == ["a", "b"]
    assert found["servers"][1] == fleet_answer()["servers"][0]
    totals = [found[name] for name in ("server_count", "l1_used_bytes", "l1_capacity_bytes", "l1_objects")]
    assert totals == [2, 6 << 30, 12 << 30, 8]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--servers", "--tokens", "1"], "--servers does not use --tokens: leave it out."),
        (["--servers", "--model", "m", "--salt", "s"], "--servers does not use --model and --salt: leave it out."),
        (["--servers", "--text", "a", "--tokenizer", "t"], "--servers does not use --text and --tokenizer"),
        (["--servers", "--instance-id", "e", "--world-size", "2"], "not use --instance-id and --world-size: leave it"),
        (["--coordinator", "c:1", "--url", "u:1", "--tokens", "1"], "--coordinator does not use --url: leave it out."),
        (["--coordinator", "c:1", "--instance-id", "e", "--tokens", "1"], "--coordinator does not use --instance-id"),
        (["--tokens", "1", "--world-size", "2"], "lmcache query without --coordinator does not use --world-size"),
        (["--tokens", "1", "--tokenizer", "t"], "lmcache query with tokens does not use --tokenizer: leave it out."),
    ],
)
def test_options_that_a_question_does_not_use_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["query", *words]) == 2
    assert said in capsys.readouterr().err


def test_another_server_is_no_coordinator(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(query_fleet, "request", lambda *_, **__: {"chunks": []})
    assert main(["query", "--coordinator", "http://c:9300", "--model", "m", "--tokens", "1"]) == 1
    assert "does not answer as a coordinator does" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--event-transport", "nats"], "--event-transport must be one of http, valkey, kafka"),
        (["--valkey-url", "redis://h:1"], "without --event-transport valkey does not use --valkey-url: give both or"),
        (
            ["--valkey-stream", "s", "--valkey-password-file", "/f"],
            "without --event-transport valkey does not use --valkey-stream and --valkey-password-file: give both or n",
        ),
        (
            ["--event-transport", "valkey", "--kafka-bootstrap-servers", "h:1", "--kafka-topic", "t"],
            "without --event-transport kafka does not use --kafka-bootstrap-servers and --kafka-topic: give both or n",
        ),
        (
            ["--kafka-config-file", "/f", "--kafka-group-id", "g"],
            "without --event-transport kafka does not use --kafka-config-file and --kafka-group-id: give both or none",
        ),
        (["--eviction-ratio", "0.5"], "--eviction-ratio is not built yet: each server keeps the quotas"),
        (["--port", "x"], "--port must be a whole number"),
        (["--host", "192.0.2.1"], "Cannot assign requested address; choose another --port or --host."),
        (["--host", "ipc:///path"], "--host must be a host name or an address"),
        (["--checkpoint-path", "/proc/none/file"], "--checkpoint-path /proc/none/file cannot be written"),
        (
            ["--checkpoint-path", "/tmp/one", "--metadata-path", "/tmp/../tmp/one"],
            "--checkpoint-path and --metadata-path must be two files, and neither may be the other with .new or .damag",
        ),
        (["--checkpoint-interval", "5"], "without --checkpoint-path does not use --checkpoint-interval: give both or"),
        (["--admin-token-file", "/none"], "--admin-token-file /none cannot be read"),
        (["--output", "x"], "--output cannot be used"),
    ],
)
def test_a_coordinator_refuses_its_options_with_a_sentence(
    capfd: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["coordinator", *words]) in (1, 2)
    err = capfd.readouterr().err
    assert said in err and "Traceback" not in err
