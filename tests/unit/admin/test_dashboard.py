"""The page at `/`, its files, and the samples that it draws."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

from lmcache.admin import dashboard_files
from lmcache.admin.app import build_app
from lmcache.admin.audit import AuditLog
from lmcache.admin.history_routes import keep_history
from lmcache.admin.requests import AdminContext
from lmcache.config.spec import ServerConfig
from lmcache.errors import ServerUnavailable
from lmcache.telemetry.metrics import Metrics
from manual_clock import ManualClock

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
TOKEN = "a token of an operator"
CODE = [path for path in dashboard_files.FOLDER.glob("*") if path.suffix in (".html", ".js", ".css")]


def client(metrics: Metrics | None = None, host: str = "127.0.0.1") -> TestClient:
    config = ServerConfig(l1_size_gb=1.0, eviction_policy="LRU")
    state: Any = SimpleNamespace(
        config=config,
        metrics=metrics or Metrics(),
        quotas=None,
        fleet=lambda: None,
        audit_log=AuditLog("", ManualClock()),
    )
    return TestClient(build_app(state, lambda: TOKEN), client=(host, 4), base_url="http://localhost")


@pytest.fixture
def without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_files, "CHART_PACKAGE", "a_package_that_is_not_there")


def linked(page: str) -> Iterator[str]:
    """The files that a page names."""
    for name in re.findall(r'(?:src|href)="([^"]+)"', page):
        if name.startswith("dashboard/"):
            yield name


def test_browsers_get_the_dashboard_and_others_the_list() -> None:
    http = client()
    page = http.get("/", headers=BROWSER)
    assert page.headers["content-type"].startswith("text/html")
    assert "uplot.js" in page.text and 'id="charts"' in page.text
    assert "POST /cache/clear" in http.get("/").text


def test_all_files_of_the_page_are_served_and_kept_by_browsers() -> None:
    http = client()
    names = set(linked(http.get("/", headers=BROWSER).text))
    folder = next(iter(names)).rpartition("/")[0]
    names |= {f"{folder}/{path.name}" for path in CODE if path.suffix == ".js"}
    assert {name.rpartition("/")[2] for name in names} >= {"uplot.js", "uplot.css", "dashboard.js", "dashboard.css"}
    for name in names:
        answer = http.get(f"/{name}")
        assert answer.status_code == 200 and answer.content, name
        assert "immutable" in answer.headers["cache-control"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert http.get(f"/{folder}/uplot.js").headers["content-type"].startswith("text/javascript")
    assert http.get(f"/{folder}/dashboard.html").status_code == 404
    assert http.get("/dashboard/another-version/uplot.js").status_code == 404


def test_the_policy_lets_nothing_come_from_elsewhere_and_no_code_stand_in_the_page() -> None:
    page = client().get("/", headers=BROWSER)
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", page.text)


@pytest.mark.parametrize("path", CODE, ids=lambda path: path.name)
def test_names_of_tenants_only_ever_become_text(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    assert "https://" not in text and "localStorage" not in text


def test_a_fleet_is_not_shown_to_other_hosts_without_the_token() -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert client(host="192.0.2.1").get("/fleet").status_code == 403
    answer = client(host="192.0.2.1").get("/fleet", headers=headers)
    assert answer.status_code == 404 and "--coordinator-url" in answer.json()["detail"]


@pytest.mark.usefixtures("without_charts")
def test_without_the_extra_the_page_of_figures_says_how_to_get_it() -> None:
    http = client()
    page = http.get("/", headers=BROWSER).text
    assert "pip install 'lmcache[dashboard]'" in page and "uplot" not in page
    for name in linked(page):
        assert http.get(f"/{name}").status_code == 200


def test_a_chart_library_that_is_another_one_is_not_given_to_browsers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "charts_of_others" / "vendor").mkdir(parents=True)
    (tmp_path / "charts_of_others" / "__init__.py").write_text("raise RuntimeError('this is not to run')")
    (tmp_path / "charts_of_others" / "vendor" / "uplot.iife.min.js").write_text("alert(1)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(dashboard_files, "CHART_PACKAGE", "charts_of_others")
    assert "pip install" in client().get("/", headers=BROWSER).text
    assert "is not that of uPlot" in caplog.text


def test_without_its_folder_a_browser_gets_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_files, "FOLDER", tmp_path)
    page = client().get("/", headers=BROWSER)
    assert page.status_code == 200 and "POST /cache/clear" in page.text


# ---- the samples ----------------------------------------------------------------------------------------------------
def sampled(metrics: Metrics, host: str, headers: dict[str, str] | None = None) -> Any:
    http = client(metrics, host)
    http.app.state.context.history.sample()  # type: ignore[attr-defined]
    return http.get("/metrics/history", headers=headers).json()


def test_salts_of_the_history_are_digests_for_those_who_may_not_read_them() -> None:
    metrics = Metrics()
    metrics.service.lookups.labels("model", "alice").inc(3)

    def salts(answer: Any) -> set[str]:
        return {series["labels"]["cache_salt"] for series in answer["series"] if "cache_salt" in series["labels"]}

    assert salts(sampled(metrics, "127.0.0.1")) == {"alice"}
    assert salts(sampled(metrics, "192.0.2.1", {"Authorization": f"Bearer {TOKEN}"})) == {"alice"}
    (digest,) = salts(sampled(metrics, "192.0.2.1"))
    assert digest != "alice" and len(digest) >= 8


def test_the_history_goes_on_after_whatever_a_sample_raised(caplog: pytest.LogCaptureFixture) -> None:
    outcomes: list[BaseException] = [ServerUnavailable("no answer"), RuntimeError("nobody expects this"), EOFError()]
    taken: list[float] = []

    def sample() -> None:
        if outcomes:
            raise outcomes.pop(0)
        taken.append(1.0)

    async def samples() -> None:
        async def figures(compute: Callable[[], None]) -> None:
            compute()

        history = SimpleNamespace(sample=sample, interval_seconds=0)
        state = SimpleNamespace(metrics=SimpleNamespace(enabled=True))
        context = SimpleNamespace(state=state, history=history, figures=figures)
        keeping = asyncio.create_task(keep_history(cast(AdminContext, context)))
        while not taken and not keeping.done():
            await asyncio.sleep(0)
        keeping.cancel()

    asyncio.run(samples())
    assert taken
    said = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(said) == 2 and all(record.exc_info for record in said)


def test_without_metrics_there_is_no_history() -> None:
    answer = client(Metrics(enabled=False)).get("/metrics/history")
    assert answer.status_code == 404 and "Metrics are off" in answer.json()["detail"]
    assert client().get("/metrics/history?since=soon").status_code == 400
