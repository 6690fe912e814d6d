"""Quotas over HTTP, in front of a real index."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.testclient import TestClient

from lmcache._native import L1Core
from lmcache.admin.app import build_app
from lmcache.admin.audit import AuditLog
from lmcache.admin.shared_answer import BURST
from lmcache.core.limits import GIB
from lmcache.core.salt_limits import SaltLimits
from lmcache.l1 import quota as quota_module
from lmcache.l1.quota import Quotas
from lmcache.telemetry.metrics import Metrics
from manual_clock import ManualClock

UNIT = 1 << 20
TOKEN = "a token of an operator"
UNIT_GB = UNIT / GIB


class Tier:
    def __init__(self) -> None:
        self.core = L1Core(16 * UNIT, 0, UNIT, "IsolatedLRU")
        self.core.set_committed(16 * UNIT)
        self.limits = SaltLimits()
        self.quotas = Quotas(self.core, self.limits, enforced=True)
        self.metrics = Metrics()
        self.metrics.on_scrape(lambda: self.quotas.publish(self.metrics.quotas))

    def store(self, salt: str, chunks: int) -> int:
        """How many got no room."""
        namespace = salt.encode().ljust(32)
        hashes = b"".join(bytes([chunk]) * 32 for chunk in range(chunks))
        reserved = self.core.reserve(1, namespace, salt, struct.pack("<Q", UNIT), hashes, 1e9)
        self.core.commit(reserved.reservation)
        return reserved.chunks_without_room


@pytest.fixture
def tier() -> Tier:
    return Tier()


@pytest.fixture
def http(tier: Tier) -> Iterator[TestClient]:
    with client_of(tier) as client:
        yield client


@contextmanager
def client_of(tier: Tier, host: str = "127.0.0.1", *, url: str = "http://localhost") -> Iterator[TestClient]:
    app = build_app(
        SimpleNamespace(quotas=tier.quotas, metrics=tier.metrics, audit_log=AuditLog("", ManualClock())),
        lambda: TOKEN,
    )
    with TestClient(app, client=(host, 4), base_url=url) as client:
        yield client
    app.state.close()


def shown(salt: str, limit: float, usage: float, exists: bool = True) -> dict[str, Any]:
    return {
        "cache_salt": salt,
        "limit_gb": limit * UNIT_GB,
        "current_usage_gb": usage * UNIT_GB,
        "exists": exists,
        "enforced": True,
    }


def test_a_quota_is_set_shown_and_removed(http: TestClient, tier: Tier) -> None:
    assert http.get("/quota/a").json() == shown("a", 0, 0, exists=False)
    assert tier.store("a", 3) == 0
    assert http.get("/quota/a").json() == shown("a", 0, 3, exists=False)  # until it is evicted, within a second
    assert http.put("/quota/a", json={"limit_gb": 2 * UNIT_GB}).json() == shown("a", 2, 2)
    assert tier.limits.of("a") == 2 * UNIT
    assert http.put("/quota/a", json={"limit_gb": UNIT_GB}).json() == shown("a", 1, 1)
    assert http.delete("/quota/a").json() == shown("a", 0, 0, exists=False)
    assert http.delete("/quota/a").status_code == 200


def test_quotas_are_metrics(http: TestClient, tier: Tier) -> None:
    metrics = Metrics()
    http.put("/quota/a", json={"limit_gb": 2 * UNIT_GB})
    http.put("/quota/b", json={"limit_gb": 0})
    tier.store("a", 1)
    tier.quotas.publish(metrics.quotas)
    http.delete("/quota/b")
    tier.quotas.publish(metrics.quotas)
    of_a = {"cache_salt": "a"}
    assert metrics.registry.get_sample_value("lmcache_mp_quota_limit_bytes", of_a) == 2 * UNIT
    assert metrics.registry.get_sample_value("lmcache_mp_quota_usage_bytes", of_a) == UNIT
    assert 'cache_salt="b"' not in metrics.exposition().decode()


def test_whoever_scrapes_while_quotas_are_brought_up_to_date_sees_them_all(tier: Tier) -> None:
    metrics, scraped = Metrics(), []

    class Core:
        """Is asked for figures in the middle of it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(tier.core, name)

        def usage_of(self, salt: str) -> int:
            scraped.append(metrics.exposition().decode())
            return tier.core.usage_of(salt)

    quotas = Quotas(cast(L1Core, Core()), tier.limits, enforced=True)
    for number in range(20):
        tier.limits.set(f"tenant-{number}", number)
    quotas.publish(metrics.quotas)
    scraped.clear()
    quotas.publish(metrics.quotas)
    names = ("quota_limit_bytes", "quota_usage_bytes")
    assert {page.count(f"\nlmcache_mp_{name}{{") for page in scraped for name in names} == {20}


def test_a_storm_of_listings_costs_as_much_as_a_few(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    quotas_of = tier.quotas.all
    monkeypatch.setattr(tier.quotas, "all", lambda: computed.append(1) or quotas_of())
    app = build_app(
        SimpleNamespace(quotas=tier.quotas, metrics=tier.metrics, audit_log=AuditLog("", ManualClock())), lambda: TOKEN
    )

    async def storm() -> list[int]:
        transport = httpx.ASGITransport(app, client=("192.0.2.1", 4))
        async with httpx.AsyncClient(transport=transport, base_url="http://cache.example") as client:
            answers = await asyncio.gather(*(client.get("/quota") for _ in range(200)))
        return [answer.status_code for answer in answers]

    assert asyncio.run(storm()) == [200] * 200
    assert len(computed) <= BURST
    app.state.close()


def test_the_empty_salt_is_default(http: TestClient, tier: Tier) -> None:
    http.put("/quota/_default", json={"limit_gb": 1})
    assert tier.store("", 2) == 0
    http.put("/quota/x%2Fy", json={"limit_gb": 0})
    http.put("/quota/z%0A", json={"limit_gb": 0})
    answer = http.get("/quota").json()
    assert [quota["cache_salt"] for quota in answer["quotas"]] == ["_default", "x/y", "z\n"]
    assert answer["quotas"][0]["current_usage_gb"] == 2 * UNIT_GB
    assert answer["enforced"] is True


@pytest.mark.parametrize("body", [{}, {"limit_gb": "1"}, {"limit_gb": -1}, {"limit_gb": True}, {"limit": 1}, [1]])
def test_what_is_no_limit_is_refused(http: TestClient, body: Any) -> None:
    answer = http.put("/quota/a", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"].endswith((".", "?"))
    assert http.get("/quota").json()["quotas"] == []


def test_only_who_may_change_state_sets_quotas(http: TestClient) -> None:
    elsewhere = {"X-Real-IP": "192.0.2.1"}
    assert http.put("/quota/a", json={"limit_gb": 1}, headers=elsewhere).status_code == 403
    assert http.delete("/quota/a", headers=elsewhere).status_code == 403
    assert http.post("/quota/a").status_code == 405
    assert http.get("/quota/" + "x" * 600).status_code == 400


def test_the_number_of_quotas_is_bounded(http: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_module, "MAX_QUOTAS", 2)
    for salt in "ab":
        assert http.put(f"/quota/{salt}", json={"limit_gb": 1}).status_code == 200
    assert http.put("/quota/a", json={"limit_gb": 2}).status_code == 200
    assert "delete some" in http.put("/quota/c", json={"limit_gb": 1}).json()["error"]


def test_salts_are_shown_to_this_host_and_to_who_has_the_token(http: TestClient, tier: Tier) -> None:
    http.put("/quota/alice", json={"limit_gb": 2 * UNIT_GB})
    http.put("/quota/_default", json={"limit_gb": 1})
    tier.store("alice", 1)
    tier.metrics.service.lookups.labels("model", "alice").inc()
    tier.metrics.service.lookups.labels("model", "").inc()

    def names(client: TestClient, **headers: str) -> set[str]:
        quotas = client.get("/quota", headers=headers).json()["quotas"]
        page = client.get("/metrics", headers=headers).text
        assert 'lmcache_mp_lookups_total{cache_salt="",model_name="model"} 1.0' in page
        in_metrics = {name for name in ("alice", alice) if f'cache_salt="{name}"' in page}
        assert f'lmcache_mp_quota_usage_bytes{{cache_salt="{min(in_metrics)}"}} 1.048576e+06' in page
        answer = client.get("/quota/alice", headers=headers)
        assert answer.status_code == (200 if "alice" in in_metrics else 403)
        assert (client.get("/quota/nobody", headers=headers).text == answer.text) is (answer.status_code == 403)
        return {quota["cache_salt"] for quota in quotas} | in_metrics

    alice = tier.metrics.salt_digest("alice")
    assert alice != Tier().metrics.salt_digest("alice"), "whoever guesses a salt could look for its digest"
    open_names, hidden = {"_default", "alice"}, {"_default", alice}
    assert names(http) == open_names
    assert names(http, **{"X-Forwarded-For": "192.0.2.1"}) == hidden  # a proxy on this host that says so
    assert names(http, Via="1.1 cache.example") == hidden
    assert names(http, Origin="http://evil.example") == hidden
    for name in ("evil.example", "evil.example@127.0.0.1", "[", "a:b:c", "\xe9vil.example".encode("latin-1")):
        assert names(http, Host=name) == hidden  # type: ignore[arg-type]
    assert names(http, Host="[::1]:8080") == names(http, Host="LOCALHOST:1") == open_names
    with client_of(tier, url="http://evil.example") as rebound:
        assert names(rebound) == hidden
    with client_of(tier, "192.0.2.1", url="http://cache.example") as elsewhere:
        assert names(elsewhere) == hidden
        assert names(elsewhere, Authorization="Bearer something else") == hidden
        assert names(elsewhere, Authorization=f"Bearer {TOKEN}") == open_names
