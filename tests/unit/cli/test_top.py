"""What `lmcache top` makes of two samples of a server, without a server and without a terminal."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache.cli import main as cli
from lmcache.cli.top import report_of
from lmcache.cli.top_figures import Sample, arranged, parse, picture


def status(pid: int = 7) -> dict[str, Any]:
    adapter = {
        "name": "disk",
        "type": "fs",
        "objects": 5,
        "used_bytes": 1 << 20,
        "capacity_bytes": 0,
        "full": False,
        "loads_suspended": True,
        "stores_suspended": False,
        "stores_in_flight": 1,
        "loads_in_flight": 2,
    }
    instance = {"instance_id": "e\x1b1", "model_name": None, "engine": None, "workers": [0], "transfer": []}
    return {
        "version": "1",
        "pid": pid,
        "uptime_seconds": 60.0,
        "sessions": 3,
        "leases": 2,
        "reservations": 1,
        "instances": [{**instance, "sessions": 3, "leases": 2}],
        "l1": {"capacity_bytes": 4 << 20, "used_bytes": 1 << 20, "objects": 9},
        "l2": {
            "adapters": [adapter],
            "store": {"queued_objects": 4},
            "prefetch": {"in_flight": 1, "waiting": 1},
        },
    }


def metrics(scale: float) -> str:
    tenants = [("m", "", 10), ("m", 'a "b"\\c', 30)]
    lines = ["# HELP lmcache_mp_lookups_total Lookups", "# TYPE lmcache_mp_lookups_total counter"]
    for model, salt, count in tenants:
        labels = f'model_name="{model}",cache_salt="{salt}"'.replace("\\", "\\\\").replace('"b"', '\\"b\\"')
        lines += [
            f"lmcache_mp_lookups_total{{{labels}}} {count * scale}",
            f"lmcache_mp_lookup_requested_tokens_total{{{labels}}} {count * 100 * scale}",
            f"lmcache_mp_lookup_hit_tokens_total{{{labels}}} {count * 60 * scale}",
            f"lmcache_mp_lookup_hit_l1_tokens_total{{{labels}}} {count * 40 * scale}",
            f"lmcache_mp_lookup_hit_l2_tokens_total{{{labels}}} {count * 20 * scale}",
        ]
    lines += [
        f'lmcache_mp_misses_total{{reason="evicted"}} {8 * scale}',
        'lmcache_mp_misses_total{reason="not_stored"} 5',
        f'lmcache_mp_l2_loaded_bytes_total{{l2_name="disk"}} {3e6 * scale}',
        f"lmcache_mp_l1_evicted_chunks_total {2e0 * scale}",
    ]
    return "\n".join(lines) + "\n"


def sample(seconds: float, scale: float, pid: int = 7) -> Sample:
    return Sample(seconds, status(pid), parse(metrics(scale)))


def test_rates_are_those_between_two_samples() -> None:
    seen = picture(sample(10.0, 1), sample(12.0, 3))
    assert seen.summary["lookups_per_second"] == 40
    assert seen.summary["requested_tokens_per_second"] == 4000
    assert seen.summary["hit_ratio"] == pytest.approx(0.6)
    assert (seen.summary["hit_ratio_l1"], seen.summary["hit_ratio_l2"]) == (pytest.approx(0.4), pytest.approx(0.2))
    assert seen.summary["misses_per_second"] == {"evicted": 8}
    assert seen.summary["evicted_per_second"] == 2
    (adapter,) = seen.tables["adapters"]
    assert (adapter["state"], adapter["loaded_bytes_per_second"], adapter["in_flight"]) == ("loads paused", 3e6, 3)
    assert [row["salt"] for row in seen.tables["tenants"]] == ["(none)", 'a "b"\\c']
    assert [row["lookups_per_second"] for row in seen.tables["tenants"]] == [10, 30]


@pytest.mark.parametrize("before", [None, sample(10.0, 9, pid=6), Sample(10.0, status(), {})])
def test_without_an_earlier_sample_of_the_same_server_rates_are_not_known(before: Sample | None) -> None:
    seen = picture(before, sample(12.0, 3))
    assert seen.summary["lookups_per_second"] is None and seen.summary["hit_ratio"] is None
    assert seen.summary["sessions"] == 3
    shown = report_of("u", seen).render("terminal")
    assert "25.0%: 1.0 MiB of 4.0 MiB, 9 objects" in shown and "hit - (L1 -, L2 -)" in shown


def test_what_is_printed_stays_on_its_line() -> None:
    shown = report_of("http://x", picture(sample(1.0, 1), sample(2.0, 2))).render("terminal")
    assert "e?1" in shown and "\x1b" not in shown
    assert "evicted 8/s" in shown and "hit 60.0% (L1 40.0%, L2 20.0%)" in shown


def test_rows_are_sorted_and_filtered() -> None:
    rows: list[dict[str, Any]] = [{"name": "b", "rate": 2.0}, {"name": "a", "rate": None}, {"name": "Cb", "rate": 5.0}]

    def names(key: str, *, descending: bool = False, wanted: str = "") -> list[str]:
        return [row["name"] for row in arranged(rows, key, descending=descending, wanted=wanted)]

    assert names("rate") == ["b", "Cb", "a"]
    assert names("rate", descending=True) == ["Cb", "b", "a"]
    assert names("name", wanted="B") == ["Cb", "b"]
    assert names("name", wanted="zzz") == []


def test_without_a_terminal_it_says_what_else_there_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["top"]) == 2
    assert "lmcache top needs a terminal: --once prints one interval" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    assert cli.main(["top"]) == 2
    assert "TERM is 'dumb': --once prints one interval." in capsys.readouterr().err
    assert cli.main(["top", "--once", "--url", "http://127.0.0.1:1"]) == 1
    assert "is the server running there?" in capsys.readouterr().err
