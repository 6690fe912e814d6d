"""The dashboard in a real Chromium, in front of a real server with traffic. TEST_SCREENSHOTS=1 writes docs/images."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache.admin import dashboard_files
from lmcache.testing.processes import LOOPBACK
from polling import until
from process.dashboard_stage import PROMPTS, TENANTS, Stage, register_many, stage
from process.support import server_within
from services.chromium import Chromium, Page

IMAGES = Path(__file__).parents[2] / "docs" / "images"
TOKEN = "the token of this dashboard"
PHONE = {"width": 390, "height": 844, "phone": True}
FROM_ANOTHER_HOST = {"X-Forwarded-For": "192.0.2.1"}  # as a proxy on this host says it
MOST_SCREENSHOT_BYTES = 150_000
HEAP_BYTES = 2 << 20  # that a page may grow by in fifty looks at the server
LOADED = "document.querySelectorAll('.plot canvas').length >= 4 && document.querySelectorAll('.tile').length === 6"
# The page looks at the server every five seconds; with this, twenty times as often.
HASTE = (
    "const patient = window.setTimeout; window.setTimeout = (act, wait, ...rest) => patient(act, wait / 20, ...rest);"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, browser: Chromium) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("dashboard")
    token = folder / "token"
    token.write_text(TOKEN)
    with stage(folder, token) as server:
        for _ in range(60):
            server.traffic(80)
        yield server


@pytest.fixture(autouse=True)
def engines(server: Stage) -> Iterator[None]:
    with server.running():
        yield


def screenshot(page: Page, name: str) -> None:
    if os.environ.get("TEST_SCREENSHOTS"):
        IMAGES.mkdir(exist_ok=True)
        page.screenshot(IMAGES / name)
        assert (IMAGES / name).stat().st_size < MOST_SCREENSHOT_BYTES, f"{name} is too large for the documents"


def figure(page: Page, tile: int) -> str:
    return page.text(f".tile:nth-child({tile}) .tile-value")


def overflow(page: Page) -> int:
    """Pixels by which the page is wider than the window."""
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def in_table(page: Page, selector: str, column: int) -> list[str]:
    cells = page.evaluate(
        f"[...document.querySelectorAll('{selector} td:nth-child({column})')].map((td) => td.innerText)"
    )
    return list(cells)


def test_what_operators_ask_first_is_there(server: Stage, browser: Chromium) -> None:
    with browser.page(server.url, width=1280, height=775) as page:
        page.until(LOADED)
        assert page.text("#health") == "healthy"
        assert re.fullmatch(r"[1-9]\d?\.\d %", figure(page, 1)), figure(page, 1)  # the hit rate
        assert re.fullmatch(r"[\d.]+ (s|min|h)", figure(page, 2)), figure(page, 2)  # the prefill time that was saved
        assert re.fullmatch(r"[\d.]+ (µs|ms|s)", figure(page, 4)), figure(page, 4)  # the latency of lookups
        assert in_table(page, "#models", 1) == sorted(TENANTS, key=in_table(page, "#models", 1).index)
        assert set(in_table(page, "#salts", 1)) == {"default", "search", "assistant", "batch", "<b>evil</b>"}
        assert {"vllm-0", "vllm-1"} <= set(in_table(page, "#engines", 1))
        names = page.evaluate("[...document.querySelectorAll('.tier h3')].map((title) => title.innerText)")
        assert names == ["L1", *(adapter["name"] for adapter in server.server.status()["l2"]["adapters"])]
        charts = page.evaluate("[...document.querySelectorAll('.chart h3')].map((title) => title.innerText)")
        for title in ("Hit rate", "Prefill time saved", "Throughput", "Latency", "Misses by reason", "Evictions"):
            assert title in charts
        assert "8.00 MiB" in page.text("#quotas")
        page.click("#charts label", "Salt")
        page.until("document.querySelector('.chart .legend').innerText.includes('assistant')")
        page.click("#charts label", "Tier")
        screenshot(page, "dashboard.png")
        assert overflow(page) == 0
        assert page.problems == []
        elsewhere = [url for url in page.requests if not url.startswith((server.url, "about:"))]
        assert elsewhere == []


def test_it_is_readable_in_the_dark_and_on_a_phone(server: Stage, browser: Chromium) -> None:
    for width, dark in ((1360, True), (390, False), (390, True), (320, False)):
        with browser.page(server.url, width=width, height=844, phone=width < 400, dark=dark) as page:
            page.until(LOADED)
            assert overflow(page) == 0, f"{width} pixels"
            colors = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
            assert all((shade < 64) == dark for shade in colors)
            assert page.problems == []
            if dark and width < 400:
                screenshot(page, "dashboard-phone.png")


def test_a_hundred_engines(server: Stage, browser: Chromium) -> None:
    register_many(server.engines[0], 100)
    with browser.page(server.url) as page:
        page.until(f"({LOADED}) && document.querySelectorAll('#engines tbody tr').length === 102")
        assert in_table(page, "#engines", 1)[:2] == ["idle-000", "idle-001"]
        assert figure(page, 6) == "102"
        page.fill("#engine-filter", "idle-04")
        page.until("document.querySelectorAll('#engines tbody tr').length === 10")
        assert page.text("#engine-count") == "10 of 102"
        page.resize(390, 844, phone=True)
        assert overflow(page) == 0
        assert all(re.fullmatch(r"\d+ s ago", beat.strip()) for beat in in_table(page, "#engines", 5))


def test_a_tab_in_the_background_asks_for_nothing_and_catches_up(server: Stage, browser: Chromium) -> None:
    with browser.page(server.url, script=HASTE) as page:
        page.until(LOADED)
        with browser.page("about:blank") as other:
            other.bring_to_front()
            page.until("document.hidden")
            quiet = page.evaluate("new Promise((done) => setTimeout(() => done(performance.now()), 20 * 500))")
            asked = len(page.requests)
            page.until(f"performance.now() > {quiet} + 2000")
            assert len(page.requests) == asked
            page.bring_to_front()
            page.until("!document.hidden")

        def since() -> list[int]:
            """What the page had when it asked for samples."""
            return [int(found[1]) for url in page.requests if (found := re.search(r"history\?since=(\d+)", url))]

        until(lambda: since()[-1] > 0)
        assert len(page.requests) > asked
        assert since()[0] == 0 and since() == sorted(since())  # only what it lacks


def test_a_page_that_is_looked_at_for_long_does_not_grow(server: Stage, browser: Chromium) -> None:
    with browser.page(server.url, script=HASTE) as page:

        def looks(count: int) -> tuple[int, int]:
            """After so many more of them: bytes, elements."""
            wanted = len([url for url in page.requests if url.endswith("/status")]) + count
            while len([url for url in page.requests if url.endswith("/status")]) < wanted:
                page.until("document.querySelectorAll('.tile').length === 6")
            return page.heap_bytes(), int(page.evaluate("document.querySelectorAll('*').length"))

        page.until(LOADED)
        heap_bytes, elements = looks(10)
        later_bytes, later_elements = looks(50)
        assert later_bytes < heap_bytes + HEAP_BYTES
        assert later_elements < elements + 100


def test_objects_are_found_pinned_and_deleted(server: Stage, browser: Chromium) -> None:
    with browser.page(server.url) as page:
        page.until(LOADED)
        page.evaluate("document.querySelector('#search [name=tier]').value = 'l1'")
        page.click("#search button")
        page.until("document.querySelectorAll('#found tbody tr').length === 100")
        key = page.evaluate("document.querySelector('#found tbody input').value")
        page.evaluate("document.querySelector('#search [name=tier]').value = 'all'")
        for part in (key[65:95].upper(), key):  # other models and salts may have the same tokens
            page.fill("#search [name=key]", part)
            page.click("#search button")
            wanted = json.dumps(part.lower())
            page.until(
                f"[...document.querySelectorAll('#found tbody input')].every((each) => each.value.includes({wanted}))"
            )
        page.click("#found button", "Choose all")
        page.click("#found button", "Pin")
        page.click("#dialog button", "Pin")
        page.until("document.querySelector('#pins').innerText.includes('dashboard')")
        page.click("#found button", "Delete")
        assert page.text("#dialog h2") == "Delete 1 object?"
        page.click("#dialog button", "Cancel")
        page.click("#found button", "Delete")
        page.click("#dialog button", "Delete")
        page.until(
            "document.querySelector('#toasts').innerText.includes('0 objects deleted, 1 left out')"
        )  # it is pinned
        page.click("#pins button", "End")
        page.click("#dialog button", "End it")
        page.until("document.querySelector('#pins').innerText.includes('Nothing is pinned')")
        assert page.problems == []


def test_before_a_limit_is_removed_the_page_says_what_that_costs(server: Stage, browser: Chromium) -> None:
    with browser.page(server.url) as page:
        page.until(LOADED)
        page.click("#quotas button", "Remove")
        assert "keeps nothing in L1" in page.text("#dialog p") and "are evicted" in page.text("#dialog p")
        page.click("#dialog button", "Cancel")
        assert page.problems == []


def test_a_prompt_is_shown_chunk_by_chunk(server: Stage, browser: Chromium) -> None:
    engine = server.engines[0]
    server.request(engine, 7, "")
    tokens = [chunk for chunk in (1, 2, *range(7000, 7008), 999_999) for _ in range(256)]
    with browser.page(server.url) as page:
        page.until(LOADED)
        page.click("#objects-title ~ .card summary")
        page.fill("#prompt [name=model]", engine.model_name)
        page.fill("#prompt [name=prompt]", json.dumps(tokens))
        page.click("#prompt button")
        page.until("document.querySelectorAll('#chunks .chunk').length === 11")
        assert page.text("#chunks p").startswith("10 of 11 chunks")
        assert page.evaluate("document.querySelectorAll('#chunks .in-l1, #chunks .in-l2').length") == 10


def test_changes_from_another_host_want_the_token_which_stays_in_the_tab(server: Stage, browser: Chromium) -> None:
    def set_quota(page: Page) -> None:
        page.click("#set-quota")
        page.fill("#dialog [name=salt]", "batch")
        page.fill("#dialog [name=limit]", "0.25")
        page.click("#dialog button", "Set")

    with browser.page(server.url, headers=FROM_ANOTHER_HOST) as page:
        page.until(LOADED)
        page.until("document.querySelector('#pins').innerText.includes('admin token')")
        assert "assistant" not in page.text("#salts") + page.text("#quotas")
        set_quota(page)
        page.until("document.querySelector('#toasts .bad')?.innerText.includes('Authorization: Bearer')")
        page.click("#token")
        page.fill("#dialog [name=token]", TOKEN)
        page.click("#dialog button", "Use it")
        page.until("document.querySelector('#salts').innerText.includes('assistant')")
        set_quota(page)
        page.until("document.querySelector('#quotas').innerText.includes('256 MiB')")
        kept = page.evaluate("[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]")
        assert TOKEN in kept[0] and kept[1:] == ["{}", ""]
        assert not any(TOKEN in url for url in page.requests)


def test_a_backend_that_died_is_seen(server: Stage, browser: Chromium) -> None:
    with browser.page(server.url, height=700, script=HASTE) as page:
        page.until(LOADED)
        server.valkey.kill()
        for prompt in range(PROMPTS, PROMPTS + 1000):  # what no tier has yet
            server.request(server.engines[0], prompt, "")
            if page.evaluate("Boolean(document.querySelector('.tier:nth-child(3) .badge.bad'))"):
                break
        assert "suspended" in page.text(".tier:nth-child(3)")
        assert "healthy" in page.text(".tier:nth-child(2)")


def test_a_tier_is_cleared_when_it_was_confirmed(server: Stage, browser: Chromium) -> None:
    with browser.page(server.url) as page:
        page.until(LOADED)
        page.click("#clear")
        page.click("#dialog button", "Clear")
        page.until("document.querySelector('#toasts').innerText.match(/[1-9]\\d* objects removed/)")


def test_without_the_extra_there_are_figures(browser: Chromium, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_files, "CHART_PACKAGE", "a_package_that_is_not_there")
    with (
        server_within() as server,
        browser.page(f"http://{LOOPBACK}:{server.config.http_port}/") as page,
    ):
        page.until("document.getElementById('health').innerText === 'healthy'")
        assert "pip install 'lmcache[dashboard]'" in page.text("body")
        page.until("document.querySelector('#figures').innerText.includes('capacity bytes')")
        assert page.problems == []
