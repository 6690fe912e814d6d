"""The table of operations over HTTP: access, errors, audit, OpenAPI and the reference, the same for all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from lmcache.admin.app import build_app, operations
from lmcache.admin.audit import AuditLog
from lmcache.admin.requests import AdminContext
from lmcache.admin.server_routes import HealthCheck
from lmcache.config.spec import ServerConfig
from lmcache.core.limits import MAX_AUDIT_REFUSALS_AT_ONCE
from lmcache.http.access import AdminToken
from lmcache.http.operation import Access, Operation
from lmcache.telemetry import logs
from lmcache.telemetry.metrics import Metrics
from manual_clock import ManualClock

TOKEN = "a token of an operator"
SOURCES = Path(__file__).parents[3]
KEY = "00" * 32 + "/" + "11" * 32


class Touched(Exception):
    """Raised by whatever a refused request would reach."""


class Untouchable:
    def __getattr__(self, name: str) -> Any:
        raise Touched(name)


def state(**parts: Any) -> Any:
    config = ServerConfig(l1_size_gb=1.0, eviction_policy="LRU")
    known: dict[str, Any] = {
        "config": config,
        "metrics": Metrics(),
        "ready": lambda: True,
        "status": dict,
        "health": lambda s: "",
    }
    known["audit_log"] = AuditLog("", ManualClock())
    return SimpleNamespace(**{**known, "operations": Untouchable(), "quotas": Untouchable(), **parts})


@pytest.fixture(scope="module")
def table() -> list[Operation]:
    context, health = AdminContext(state(), lambda: TOKEN), HealthCheck(state())
    context.close()
    health.close()
    return operations(context, health)


@pytest.fixture
def elsewhere() -> Iterator[TestClient]:
    app = build_app(state(clear=Untouchable()), lambda: TOKEN)
    with TestClient(app, client=("192.0.2.1", 4), base_url="http://cache.example") as client:
        yield client
    app.state.close()


def asked(operation: Operation) -> tuple[str, str]:
    return operation.method, operation.open_path.replace("{cache_salt}", "a").replace("{request_id}", "x-1")


def test_from_another_host_nothing_is_touched_and_nothing_shown(table: list[Operation], elsewhere: TestClient) -> None:
    refused = 0
    for operation in table:
        if operation.access is Access.PUBLIC:
            continue
        for headers in ({}, {"Authorization": "Bearer another token of somebody"}):
            body = b"not even JSON" if operation.body is not None else b""
            answer = elsewhere.request(*asked(operation), content=body, headers=headers)
            assert answer.status_code == 403, operation
            assert answer.headers["content-type"] == "application/problem+json"
            assert "admin token" in answer.json()["detail"]
            refused += 1
    assert refused == 2 * sum(operation.access is not Access.PUBLIC for operation in table) >= 26


def test_every_change_and_every_read_of_keys_is_declared_so(table: list[Operation]) -> None:
    for operation in table:
        public_read = not operation.path.startswith(("/cache", "/jobs", "/quota/"))
        if operation.method != "GET" and operation.path != "/cache/lookup":
            assert operation.access is Access.CHANGE, operation
        elif not public_read:
            assert operation.access is Access.READ, operation


def test_what_names_keys_is_not_shown_under_a_name_of_another_site() -> None:
    app = build_app(state(), lambda: TOKEN)
    with TestClient(app, client=("127.0.0.1", 4), base_url="http://evil.example") as rebound:
        answer = rebound.get("/cache/objects")
        assert answer.status_code == 403 and "localhost" in answer.json()["detail"]
    app.state.close()


def test_a_refusal_is_problem_details(elsewhere: TestClient) -> None:
    answer = elsewhere.get("/nowhere")
    assert answer.json() == {
        "type": "about:blank",
        "title": "Not Found",
        "status": 404,
        "detail": "There is nothing at /nowhere of a cache server; GET / lists what there is.",
        "error": "There is nothing at /nowhere of a cache server; GET / lists what there is.",
    }
    assert elsewhere.patch("/cache/objects").json()["title"] == "Method Not Allowed"


@pytest.mark.parametrize(
    ("method", "path", "body", "said"),
    [
        ("DELETE", "/cache/objects", {}, 'the key "keys" is required'),
        ("DELETE", "/cache/objects", {"keys": ["../../etc"]}, "NAMESPACE/HASH"),
        ("DELETE", "/cache/objects", {"keys": [KEY], "teir": "l1"}, "did you mean tier"),
        ("GET", "/cache/objects?tier=l3", None, "must be one of l1, l2, all"),
        ("GET", "/cache/objects?page_size=0", None, "whole number from 1 to"),
        ("GET", "/cache/objects?page_size=x", None, "whole number from 1 to"),
        ("GET", "/cache/objects?tier=l1&tier=l2", None, "twice"),
        ("POST", "/cache/lookup", {"model_name": "m"}, 'either "tokens" or "text"'),
        ("POST", "/cache/lookup", {"model_name": "m", "tokens": [-1]}, "whole numbers from 0"),
        ("POST", "/cache/lookup", {"model_name": "m", "text": "x"}, "--tokenizer-dir"),
        ("POST", "/cache/pins", {"keys": [KEY], "owner": "me", "ttl_seconds": 0}, "a number above 0"),
        ("DELETE", "/cache/pins", {}, 'either "pin_id" or "owner"'),
        ("GET", "/jobs/x-1", None, "There is no such job"),
    ],
)
def test_what_cannot_be_understood_is_one_sentence(method: str, path: str, body: Any, said: str) -> None:
    app = build_app(state(operations=SimpleNamespace()), lambda: TOKEN)
    with TestClient(app, client=("127.0.0.1", 4), base_url="http://localhost") as http:
        answer = http.request(method, path, json=body)
        assert answer.status_code in (400, 404), answer.text
        assert said in answer.json()["detail"]
    app.state.close()


def test_changes_are_recorded_and_so_are_refused_ones(tmp_path: Path) -> None:
    log = AuditLog(str(tmp_path / "audit.jsonl"), ManualClock())
    app = build_app(state(clear=lambda tier, force: (3, 4096), audit_log=log), lambda: TOKEN)
    with TestClient(app, client=("192.0.2.9", 4)) as http:
        http.get("/version")
        headers = {"Authorization": f"Bearer {TOKEN}", "X-Forwarded-For": "198.51.100.1"}
        assert http.post("/cache/clear", json={"tier": "all"}, headers=headers).status_code == 200
        assert http.post("/cache/clear", json={"tier": "l2"}).status_code == 403
        assert http.delete("/quota/alice").status_code == 403
    app.state.close()
    log.close()
    text = (tmp_path / "audit.jsonl").read_text()
    cleared, refused, quota = map(json.loads, text.splitlines())
    assert TOKEN not in text
    assert cleared["caller"] == "192.0.2.9, x-forwarded-for: 198.51.100.1, with the admin token"
    assert (cleared["action"], cleared["detail"]) == ("cache.clear", {"tier": "all", "force": False})
    assert cleared["outcome"] == "ok" and "admin token" in refused["outcome"]
    assert (quota["action"], quota["detail"]) == ("quota.delete", {"cache_salt": "alice"})


@pytest.mark.parametrize(
    ("asked", "level"),
    [
        ({"params": {"level": "debug"}}, "debug"),
        ({"json": {"level": "warning"}}, "warning"),
        ({"params": {"level": "debug"}, "json": {"level": "warning"}}, "warning"),
    ],
)
def test_a_change_that_is_asked_for_in_the_query_is_recorded_as_it_was(
    tmp_path: Path, asked: dict[str, Any], level: str
) -> None:
    log, before = AuditLog(str(tmp_path / "audit.jsonl"), ManualClock()), logs.current_level()
    app = build_app(state(audit_log=log), lambda: TOKEN)
    try:
        with TestClient(app, client=("127.0.0.1", 4), base_url="http://localhost") as http:
            assert http.put("/loglevel", **asked).json() == {"level": level.upper()}
    finally:
        logs.set_level(before)
        app.state.close()
        log.close()
    assert json.loads((tmp_path / "audit.jsonl").read_text())["detail"] == {"level": level}


def test_refused_changes_do_not_fill_the_audit_log(tmp_path: Path) -> None:
    log = AuditLog(str(tmp_path / "audit.jsonl"), ManualClock())
    app = build_app(state(audit_log=log), lambda: TOKEN)
    with TestClient(app, client=("192.0.2.9", 4)) as http:
        for _ in range(2 * MAX_AUDIT_REFUSALS_AT_ONCE):
            assert http.put("/quota/" + "x" * 4000).status_code == 403
    app.state.close()
    log.close()
    lines = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert len(lines) == MAX_AUDIT_REFUSALS_AT_ONCE + 1
    assert json.loads(lines[-1])["detail"] == {"requests": MAX_AUDIT_REFUSALS_AT_ONCE}


def test_a_token_that_is_replaced_counts_at_once(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    token = AdminToken(str(path))
    assert token() == "0123456789abcdef"
    new = tmp_path / "new"
    new.write_text("fedcba9876543210\n")
    new.rename(path)
    assert token() == "fedcba9876543210"
    path.write_text("short\n")
    assert token() == ""
    path.unlink()
    assert token() == ""
    path.write_text("0123456789abcdef\n")
    assert token() == "0123456789abcdef"
    assert AdminToken("")() == ""


def test_the_openapi_document_has_every_operation(table: list[Operation]) -> None:
    app = build_app(state())
    with TestClient(app) as http:
        document = http.get("/openapi.json").json()
    app.state.close()
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(operation.method, operation.open_path) for operation in table}
    ids = [entry["operationId"] for methods in document["paths"].values() for entry in methods.values()]
    assert len(ids) == len(set(ids))
    text = json.dumps(document)
    for name in document["components"]["schemas"]:
        assert f"#/components/schemas/{name}" in text or name.endswith("Query"), name
    listing = document["paths"]["/cache/objects"]["get"]
    assert {parameter["name"] for parameter in listing["parameters"]} == {
        *("tier", "adapter", "model_name", "key", "page_size", "page_token"),
    }
    assert listing["security"] == [{}, {"admin_token": []}]
    assert msgspec.json.decode(msgspec.json.encode(document)) == document


def test_the_reference_page_is_current() -> None:
    script = SOURCES / "scripts" / "write_http_reference.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
