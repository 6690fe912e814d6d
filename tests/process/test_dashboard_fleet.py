"""The fleet in a real Chromium: on the page of a server that has joined, and on that of the coordinator."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lmcache.server import Server
from lmcache.testing.processes import LOOPBACK, CoordinatorProcess
from polling import until
from process.support import SmallEngine, server_within
from services.chromium import Chromium, Page

TOKEN = "the token of this fleet"
OTHERS = 99
FROM_ANOTHER_HOST = {"X-Forwarded-For": "192.0.2.1"}  # as a proxy on this host says it
MIB = 1 << 20
ALL = "document.querySelectorAll('#fleet tbody tr').length === 100"
HASTE = (
    "const patient = window.setTimeout; window.setTimeout = (act, wait, ...rest) => patient(act, wait / 20, ...rest);"
)
LONG_NAME = "a-machine-with-a-name-that-is-as-long-as-names-of-pods-in-kubernetes-are-7d4b9c6f5-x2x9z"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text(TOKEN)
    return path


class _Answers(BaseHTTPRequestHandler):
    """Of servers that hold no pins."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"pins": []}')

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def others_port() -> Iterator[int]:
    """At every address of loopback."""
    with ThreadingHTTPServer(("", 0), _Answers) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield listener.server_port
        listener.shutdown()


@pytest.fixture(scope="module")
def coordinator(
    tmp_path_factory: pytest.TempPathFactory, token_file: Path, others_port: int
) -> Iterator[CoordinatorProcess]:
    options = ["--instance-timeout", "3600", "--admin-token-file", str(token_file)]
    with CoordinatorProcess(tmp_path_factory.mktemp("coordinator"), extra=options) as coordinator:
        coordinator.wait_ready()
        for number in range(OTHERS):
            other_joins(coordinator, number, others_port)
        until(lambda: not any(entry["behind"] for entry in coordinator.answer("GET", "/fleet")["servers"]))
        yield coordinator


def other_joins(coordinator: CoordinatorProcess, number: int, port: int) -> None:
    """A server that nobody runs; of the first two something is missing."""
    name = LONG_NAME if number == 2 else f"machine-{number:02}"
    body = {"instance_id": name, "ip": f"127.0.0.{number + 100}", "http_port": port}
    coordinator.answer("POST", "/instances", body)
    entry = {"key": {"chunk_hash_hex": "ab" * 32, "model_name": "m", "kv_rank": 0}, "size_bytes": (number + 1) * MIB}
    stream = {"instance_id": name, "incarnation": 5, "tier": "l1"}
    batches: list[dict[str, Any]] = [
        {**stream, "seq": 1, "event_type": "config", "capacity_bytes": 100 * MIB},
        {**stream, "seq": 2, "event_type": "store", "entries": [entry]},
        {**stream, "seq": 4 if number == 0 else 3, "event_type": "access"},
        {**stream, "seq": 4, "event_type": "config", "resync": "begin"},
    ]
    coordinator.answer("POST", "/events", {"batches": batches if number == 1 else batches[:3]})


@pytest.fixture(scope="module")
def server(coordinator: CoordinatorProcess, token_file: Path) -> Iterator[Server]:
    with (
        server_within(
            coordinator_url=coordinator.url,
            coordinator_heartbeat_interval=0.3,
            coordinator_event_flush_interval=0.1,
            instance_id="this-machine",
            admin_token_file=str(token_file),
        ) as server,
        SmallEngine(server.rpc.endpoint) as engine,
    ):
        engine.store(engine.tokens(1, 2, 3))
        until(lambda: told(coordinator, "this-machine")["l1_objects"] == 3)
        yield server


def told(coordinator: CoordinatorProcess, name: str) -> dict[str, Any]:
    servers = coordinator.answer("GET", "/fleet")["servers"]
    return next((entry for entry in servers if entry["instance_id"] == name), {"l1_objects": 0})


def url_of(server: Server) -> str:
    return f"http://{LOOPBACK}:{server.config.http_port}/"


def overflow(page: Page) -> int:
    """Pixels by which the page is wider than the window."""
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def rows(page: Page) -> list[str]:
    found = page.evaluate("[...document.querySelectorAll('#fleet tbody tr')].map((row) => row.innerText)")
    return list(found)


def pages(server: Server, coordinator: CoordinatorProcess) -> tuple[str, str]:
    return url_of(server), f"{coordinator.url}/"


def test_both_pages_show_a_hundred_servers(server: Server, coordinator: CoordinatorProcess, browser: Chromium) -> None:
    for url in pages(server, coordinator):
        with browser.page(url, width=1280, height=900) as page:
            page.until(ALL)
            first, second, *others = rows(page)
            assert "machine-00" in first and "events missing" in first and "127.0.0.100:" in first
            assert "machine-01" in second and "resyncing" in second
            assert not any("missing" in row or "resyncing" in row for row in others)
            assert "50.0 %" in next(row for row in others if "machine-49" in row)
            assert page.text("#fleet-count") == "100"
            page.fill("#fleet-filter", "THIS-")
            page.until("document.querySelectorAll('#fleet tbody tr').length === 1")
            (own,) = rows(page)
            assert ("(this one)" in own) == (url == url_of(server)) and "\t3\t" in own
            assert page.text("#fleet-count") == "1 of 100"
            assert page.problems == []
            assert [asked for asked in page.requests if not asked.startswith((url, "about:"))] == []


def test_they_are_readable_in_the_dark_and_on_a_phone(
    server: Server, coordinator: CoordinatorProcess, browser: Chromium
) -> None:
    for url in pages(server, coordinator):
        for width, dark in ((1360, True), (390, False), (390, True), (320, False)):
            with browser.page(url, width=width, height=844, phone=width < 400, dark=dark) as page:
                page.until(ALL)
                assert overflow(page) == 0, f"{url} at {width} pixels"
                inside = "document.querySelector('#fleet').scrollWidth - document.querySelector('#fleet').clientWidth"
                assert width < 390 or page.evaluate(inside) == 0, f"{url} at {width} pixels"
                assert page.problems == []


def test_from_another_host_nobody_sees_servers_without_the_token(
    server: Server, coordinator: CoordinatorProcess, browser: Chromium
) -> None:
    for url in pages(server, coordinator):
        with browser.page(url, headers=FROM_ANOTHER_HOST) as page:
            page.until("document.querySelector('#fleet').innerText.includes('Authorization: Bearer')")
            for secret in ("machine", "127.0.0", coordinator.url):
                assert secret not in page.text("body")
            page.click("#token")
            page.fill("#dialog [name=token]", TOKEN)
            page.click("#dialog button", "Use it")
            page.until(ALL)
            assert not any(TOKEN in asked for asked in page.requests)


def test_a_server_without_a_coordinator_shows_no_fleet(browser: Chromium) -> None:
    with server_within() as alone, browser.page(url_of(alone)) as page:
        page.until("document.getElementById('health').innerText === 'healthy'")
        page.until("document.querySelectorAll('.tile').length === 6")
        assert page.evaluate("document.querySelector('#fleet-section').offsetParent") is None
        assert not any("fleet" in asked.rpartition("/")[2] and ".js" not in asked for asked in page.requests)


def test_of_a_coordinator_that_has_died_the_page_says_what_it_knew(
    browser: Chromium, coordinator: CoordinatorProcess, server: Server
) -> None:
    """The last of this module: the coordinator is gone afterwards."""
    with browser.page(url_of(server), script=HASTE) as page:
        page.until(ALL)
        assert "coordinator reached" in page.text("#fleet-state")
        coordinator.kill()
        page.until("document.querySelector('#fleet-state').innerText.includes('coordinator not reached')")
        page.until("document.querySelector('#fleet-state').innerText.includes('ago')")
        assert "nothing answers at" in page.text("#fleet-state") and len(rows(page)) == 100
        assert page.text("#health") == "healthy"
