"""What the dashboard shows in a real Chromium is what the server counted, and what the test did."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lmcache.core.limits import FRAME_HEADER_BYTES, GIB
from lmcache.protocol import messages as m
from lmcache.testing.processes import LOOPBACK, http_json
from polling import until
from process.dashboard_stage import hasty_history
from process.support import CALL_SECONDS, SmallEngine, server_within
from services.chromium import Chromium, Page

LAPSE = 10
FRAME_BYTES = 64 * 1024
L2_FRAMES = 100
L2_WATERMARK = 0.5
CHUNKS, HIT_CHUNKS = 4, 3  # of each prompt of the tenant that hits
HITS, MISSES = 32, 16  # requests
TOKENS = CHUNKS * 256
OLD_SECONDS = 1.0  # that objects lie in L1, at least, before they are evicted
NOTHING = "\u2013"  # a figure that there is not
HASTE = "const patient = window.setTimeout; window.setTimeout = (act, wait) => patient(act, wait / 20);"
MODEL = "Qwen/Qwen3-8B"


def counted(port: int) -> dict[str, float]:
    """Sums over all labels of what /metrics says."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(str(http_json(port, "GET", "/metrics")[1])):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def drive(engine: SmallEngine) -> None:
    """HITS requests that find HIT_CHUNKS of their CHUNKS, MISSES that find none, and more objects than L2 may have."""
    for prompt in range(HITS):
        engine.store(engine.tokens(*range(100 * prompt, 100 * prompt + HIT_CHUNKS)), salt="red")
    for prompt in range(HITS):
        tokens = engine.tokens(*range(100 * prompt, 100 * prompt + CHUNKS))
        reply = engine.lookup(f"red {prompt}", tokens, salt="red")
        release = m.Release(engine.instance_id, reply.lease, loaded_tokens=HIT_CHUNKS * 256, prefill_seconds=0.5)
        engine.client.call("release", release, CALL_SECONDS)
        engine.end(f"red {prompt}")
    for prompt in range(MISSES):
        engine.lookup(
            f"blue {prompt}", engine.tokens(*range(9000 + 10 * prompt, 9000 + 10 * prompt + CHUNKS)), salt="blue"
        )
        engine.end(f"blue {prompt}")


def has_settled(found: dict[str, float]) -> bool:
    """All has reached L2, and what was too much has left it."""
    is_stored = found["lmcache_mp_l2_stored_bytes_total"] == HITS * HIT_CHUNKS * FRAME_BYTES
    return is_stored and found["lmcache_mp_l2_usage_bytes"] <= L2_WATERMARK * L2_FRAMES * FRAME_BYTES


def rows(page: Page, selector: str) -> list[list[str]]:
    cells = f"[...document.querySelectorAll('{selector} tbody tr')].map((row) => [...row.cells])"
    found = page.evaluate(f"{cells}.map((row) => row.map((cell) => cell.innerText))")
    return [[" ".join(cell.split()) for cell in row] for row in found]


def fill_of(page: Page, tier: int) -> tuple[str, float]:
    """What a tier's card says of how full it is, and the share of its bar that is filled."""
    card = f".tier:nth-child({tier})"
    width = f"document.querySelector('{card} .filled').style.width"
    return page.text(f"{card} .used"), float(page.evaluate(f"parseFloat({width}) / 100"))


def filled(used: int, capacity: int) -> str:
    return f"{used / 2**20:.2f} MiB of {capacity / 2**20:.{2 if capacity < 10 << 20 else 1}f} MiB · " + (
        f"{used / capacity:.1%}".replace("%", " %")
    )


def facts(page: Page, tier: int) -> dict[str, str]:
    """Of a tier's card, by their names."""
    card = f"document.querySelector('.tier:nth-child({tier}) .facts')"
    names, values = page.evaluate(
        f"['dt', 'dd'].map((part) => [...{card}.querySelectorAll(part)].map((e) => e.innerText))"
    )
    return dict(zip(names, values, strict=True))


def shown_seconds(page: Page) -> float | None:
    text = facts(page, 1)["Age when evicted"]
    if text == NOTHING:
        return None
    value, unit = text.split()
    return float(value) * {"ms": 0.001, "s": 1.0}[unit]


def test_figures_are_those_of_the_server(tmp_path: Path) -> None:
    adapter: dict[str, Any] = {"type": "fs_native", "base_path": str(tmp_path / "l2")}
    adapter["max_capacity_gb"] = L2_FRAMES * FRAME_BYTES / GIB
    adapter["eviction"] = {"eviction_policy": "LRU", "trigger_watermark": L2_WATERMARK, "eviction_ratio": 0.2}
    with (
        Chromium(tmp_path) as browser,
        hasty_history(LAPSE),
        server_within(l2_adapter=[adapter]) as server,
        SmallEngine(server.rpc.endpoint, payload_bytes=FRAME_BYTES - FRAME_HEADER_BYTES, model_name=MODEL) as engine,
    ):
        port = server.config.http_port
        until(lambda: http_json(port, "GET", "/metrics/history?since=0")[1]["times"])  # before anything is counted
        drive(engine)
        until(lambda: has_settled(counted(port)), tell=lambda: counted(port))
        found, status = counted(port), http_json(port, "GET", "/status")[1]
        with browser.page(f"http://{LOOPBACK}:{port}/", script=HASTE) as page:
            asked = (HITS + MISSES) * TOKENS
            page.until(f"document.querySelector('.tile')?.innerText.includes('of {asked / 1000:.1f} k tokens')")
            evicted = int(found["lmcache_mp_l2_evicted_objects_total"])
            until(lambda: facts(page, 2)["Evicted"] == str(evicted), tell=lambda: facts(page, 2))
            tiles = [
                text.split("\n")
                for text in page.evaluate("[...document.querySelectorAll('.tile')].map((e) => e.innerText)")
            ]
            models, salts = rows(page, "#models"), rows(page, "#salts")
            page.click("#charts label", "Salt")
            page.until("document.querySelector('.chart .legend').innerText.includes('red')")
            legend = page.text(".chart .legend").split()
            l1, l2 = facts(page, 1), facts(page, 2)
            fills = [fill_of(page, tier) for tier in (1, 2)]
    share = HITS * HIT_CHUNKS / ((HITS + MISSES) * CHUNKS)
    assert found["lmcache_mp_lookup_requested_tokens_total"] == asked
    assert found["lmcache_mp_lookup_hit_tokens_total"] == asked * share
    assert tiles[0] == ["Hit rate", f"{share:.1%}".replace("%", " %"), f"of {asked / 1000:.1f} k tokens"]
    saved = found["lmcache_mp_prefill_saved_seconds_total"]
    assert saved == pytest.approx(HITS * 0.5) and tiles[1][1:] == [f"{saved:.0f} s", f"{saved:.0f} s since the start"]
    given = HITS * HIT_CHUNKS * FRAME_BYTES
    assert found["lmcache_mp_tier_hit_bytes_total"] == given
    assert tiles[4][2].startswith(f"{given / 2**20:.2f} MiB in ")
    assert models == [[MODEL, f"{asked / 1000:.1f} k", tiles[0][1]]]
    assert salts == [
        ["red", f"{HITS * TOKENS / 1000:.1f} k", "75.0 %"],
        ["blue", f"{MISSES * TOKENS / 1000:.1f} k", "0 %"],
    ]
    assert legend == ["red", "75.0", "%", "blue", "0", "%"]
    tiers = [status["l1"], status["l2"]["adapters"][0]]
    assert tiers[0]["used_bytes"] == given and 0 < tiers[1]["used_bytes"] == found["lmcache_mp_l2_usage_bytes"]
    assert tiers[1]["capacity_bytes"] == L2_FRAMES * FRAME_BYTES
    for tier, (said, share_of_bar) in zip(tiers, fills, strict=True):
        used, capacity = tier["used_bytes"], tier["capacity_bytes"]
        assert said == filled(used, capacity)
        assert share_of_bar == pytest.approx(used / capacity, abs=0.001)
    assert l1["Objects"] == str(HITS * HIT_CHUNKS) and l2["Objects"] == str(status["l2"]["adapters"][0]["objects"])
    assert evicted == HITS * HIT_CHUNKS - int(l2["Objects"]) > 0
    age, of_window = (float(text.split()[-2]) for text in (l2["Age when evicted"], tiles[2][2]))
    assert age == pytest.approx(of_window * int(l2["Objects"]) / evicted, rel=0.1)


def test_the_age_of_what_l1_evicts_is_told_once_something_was(tmp_path: Path) -> None:
    """What is evicted is of the first half, as less follows than fills L1."""
    began = time.monotonic()
    with (
        Chromium(tmp_path) as browser,
        hasty_history(LAPSE),
        server_within(metrics_sample_rate=1.0) as server,
        SmallEngine(server.rpc.endpoint, payload_bytes=FRAME_BYTES - FRAME_HEADER_BYTES) as engine,
    ):
        port = server.config.http_port
        room = http_json(port, "GET", "/status")[1]["l1"]["capacity_bytes"] // FRAME_BYTES
        with browser.page(f"http://{LOOPBACK}:{port}/", script=HASTE) as page:
            engine.store(engine.tokens(*range(room // 2)))
            until(lambda: facts(page, 1).get("Objects") == str(room // 2), tell=lambda: facts(page, 1))
            assert facts(page, 1)["Age when evicted"] == NOTHING
            stored = time.monotonic()
            until(lambda: time.monotonic() - stored > OLD_SECONDS)
            engine.store(engine.tokens(*range(room, room + room * 9 // 20)))

            def is_shown() -> bool:
                age = counted(port)["lmcache_mp_l1_eviction_age_seconds"]
                return OLD_SECONDS < age < time.monotonic() - began and shown_seconds(page) == pytest.approx(
                    age, rel=0.06
                )

            until(is_shown, tell=lambda: (facts(page, 1), counted(port)["lmcache_mp_l1_eviction_age_seconds"]))
