"""Figures of a run of `lmcache bench engine`, and of two runs side by side."""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmcache.cli.engine_bench.completion_client import Outcome
from lmcache.cli.engine_bench.load_generator import Measured
from lmcache.cli.output import Report
from lmcache.errors import ConfigError

TITLE = "Engine bench"
PERCENTILES = (50, 90, 99)
_MAX_ERROR_KINDS = 20
_SPREADS = {
    "ttft_ms": "Time to first token, ms",
    "itl_ms": "Between tokens, ms",
    "tpot_ms": "A token after the first, ms",
    "total_ms": "Whole request, ms",
    "late_ms": "Sent after it was due, ms",
}
_TOTALS = {
    "completed": "Requests completed",
    "failed": "Requests failed",
    "unsent": "Requests not sent, or cut off",
    "wall_seconds": "Time, s",
    "requests_per_second": "Requests a second",
    "prompt_tokens": "Prompt tokens",
    "cached_tokens": "... of them cached",
    "cached_ratio": "... as a share",
    "output_tokens": "Output tokens",
    "output_tokens_per_second": "Output tokens a second",
    "total_tokens_per_second": "All tokens a second",
}


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest of the sorted values, of which there is at least one."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Milliseconds: mean, percentiles and maximum. None without values."""
    if not seconds:
        return None
    cuts = {f"p{percent}": percentile(seconds, percent) for percent in PERCENTILES}
    found = {"mean": math.fsum(seconds) / len(seconds), **cuts, "max": max(seconds)}
    return {name: round(value * 1e3, 3) for name, value in found.items()}


def summary(measured: Measured) -> dict[str, Any]:
    """Figures as JSON values. Times and tokens are those of completed requests; a figure that the server does not tell
    is None."""
    done = [outcome for outcome in measured.outcomes if not outcome.error]
    errors = collections.Counter(outcome.error for outcome in measured.outcomes if outcome.error)
    wall = measured.wall_seconds
    output = sum(outcome.output_tokens for outcome in done)
    prompt = [outcome.prompt_tokens for outcome in done if outcome.prompt_tokens is not None]
    cached = [outcome.cached_tokens for outcome in done if outcome.cached_tokens is not None]
    prompt_tokens = sum(prompt) if prompt else None
    cached_tokens = sum(cached) if cached else None
    return {
        "completed": len(done),
        "failed": len(measured.outcomes) - len(done),
        "unsent": measured.planned - len(measured.outcomes),
        "wall_seconds": round(wall, 3),
        "requests_per_second": round(len(done) / wall, 3),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "cached_ratio": round(cached_tokens / prompt_tokens, 4)
        if cached_tokens is not None and prompt_tokens
        else None,
        "output_tokens": output,
        "output_tokens_per_second": round(output / wall, 3),
        "total_tokens_per_second": round((output + (prompt_tokens or 0)) / wall, 3) if prompt else None,
        **_spreads(done),
        "labels": {label: _of_label(done, label) for label in dict.fromkeys(outcome.label for outcome in done)},
        "errors": dict(errors.most_common(_MAX_ERROR_KINDS)),
        "stopped": measured.stopped,
    }


def _spreads(done: Sequence[Outcome]) -> dict[str, dict[str, float] | None]:
    after_first = [
        (outcome.last_token_seconds - outcome.first_token_seconds) / (outcome.output_tokens - 1)
        for outcome in done
        if outcome.output_tokens > 1
        and outcome.first_token_seconds is not None
        and outcome.last_token_seconds is not None
    ]
    return {
        "ttft_ms": spread([found for outcome in done if (found := outcome.first_token_seconds) is not None]),
        "itl_ms": spread([gap for outcome in done for gap in outcome.gaps]),
        "tpot_ms": spread(after_first),
        "total_ms": spread([outcome.total_seconds for outcome in done]),
        "late_ms": spread([outcome.late_seconds for outcome in done]),
    }


def _of_label(done: Sequence[Outcome], label: str) -> dict[str, Any]:
    ours = [outcome for outcome in done if outcome.label == label]
    cached = [outcome.cached_tokens for outcome in ours if outcome.cached_tokens is not None]
    return {
        "completed": len(ours),
        "cached_tokens": sum(cached) if cached else None,
        "ttft_ms": spread([found for outcome in ours if (found := outcome.first_token_seconds) is not None]),
    }


def each_request(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """For plots and tools of others; seconds."""
    return [
        {
            "label": outcome.label,
            "sent": round(outcome.sent_seconds, 6),
            "ttft": None if outcome.first_token_seconds is None else round(outcome.first_token_seconds, 6),
            "total": round(outcome.total_seconds, 6),
            "prompt_tokens": outcome.prompt_tokens,
            "cached_tokens": outcome.cached_tokens,
            "output_tokens": outcome.output_tokens,
            "error": outcome.error,
        }
        for outcome in outcomes
    ]


# ---- shown -----------------------------------------------------------------------------------------------------------
def report_of(result: Mapping[str, Any]) -> Report:
    """The report of a run as `--save` keeps it."""
    figures, settings = result["figures"], result["settings"]
    report = Report(TITLE)
    report.metrics = dict(result)
    report.text(f"{settings['workload']} on {settings['model']} at {settings['url']}")
    for key, label in _TOTALS.items():
        if figures[key] is not None and not (key == "unsent" and not figures[key]):
            report.text(f"{label + ':':<40}{_shown(key, figures[key]):>24}")
    report.section("times")
    heads = ("", "mean", *(f"p{percent}" for percent in PERCENTILES), "max")
    report.table(heads, [_times(label, figures[key]) for key, label in _SPREADS.items() if _worth(key, figures)])
    if len(figures["labels"]) > 1:
        report.section("time to first token, ms")
        rows = [
            (*_times(label, part["ttft_ms"]), str(part["completed"]), _shown("cached_tokens", part["cached_tokens"]))
            for label, part in figures["labels"].items()
        ]
        report.table((*heads, "requests", "cached tokens"), rows)
    for kind, count in figures["errors"].items():
        report.text(f"{count} x {kind}")
    if figures["stopped"]:
        report.text(f"Ended early: {figures['stopped']}.")
    if figures["completed"] and figures["cached_tokens"] is None:
        report.text("This server does not tell cached tokens (vLLM does with --enable-prompt-tokens-details).")
    return report


def _worth(key: str, figures: Mapping[str, Any]) -> bool:
    return bool(figures[key]) and not (key == "late_ms" and figures[key]["max"] < 1)


def _times(label: str, found: Mapping[str, float] | None) -> tuple[str, ...]:
    names = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")
    return (label, *(f"{found[name]:.1f}" if found else "-" for name in names))


def _shown(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    if key == "cached_ratio":
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


# ---- two runs --------------------------------------------------------------------------------------------------------
def read_result(path: str) -> dict[str, Any]:
    """Reads a file that --save, or --format json with --output, has written. ConfigError names what is wrong with
    it."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError:
        found = None
    metrics = found.get("metrics") if isinstance(found, dict) and found.get("title") == TITLE else None
    if not isinstance(metrics, dict) or not {"figures", "settings", "requests"} <= metrics.keys():
        raise ConfigError(f"{path} is no result of lmcache bench engine: write one with --save FILE.")
    return dict(metrics)


def comparison(paths: Sequence[str], results: Sequence[Mapping[str, Any]]) -> Report:
    """Two runs side by side."""
    report = Report(f"{TITLE}, compared")
    first, second = (flat(result["figures"]) for result in results)
    rows, changes = [], {}
    for name in {**first, **second}:
        before, after = first.get(name), second.get(name)  # None: that run has no such figure
        change = after / before - 1 if before and after is not None else None
        changes[name] = {"first": before, "second": after, "change": None if change is None else round(change, 4)}
        rows.append((name, _compared(before), _compared(after), "-" if change is None else f"{change:+.1%}"))
    settings = [result["settings"] for result in results]
    differing = sorted(
        name for name in {**settings[0], **settings[1]} if settings[0].get(name) != settings[1].get(name)
    )
    report.metrics = {"files": list(paths), "figures": changes, "differing_settings": differing}
    for number, path in enumerate(paths, 1):
        report.text(f"{number}: {path}")
    for name in differing:
        report.text(f"{name}: {settings[0].get(name)} and {settings[1].get(name)}")
    report.section("figures")
    report.table(("", "1", "2", "change"), rows)
    return report


def _compared(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def flat(figures: Mapping[str, Any]) -> dict[str, float]:
    """Numbers by dotted names, those of percentiles included."""
    found: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping) and name in _SPREADS:
            found |= {f"{name}.{part}": number for part, number in value.items()}
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = value
    return found
