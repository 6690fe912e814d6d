"""Plots of runs of `lmcache bench engine`, as SVG files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmcache.errors import ResourceError
from lmcache.simulation.chart import Chart

_LEAST_SECONDS = 1e-4
_STEPS = 5  # of an axis


def draw_all(folder: str, runs: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """Writes the plots of these results, by their names, into the folder; one run has a curve for each label. The
    files. ResourceError where they cannot be written."""
    curves: dict[str, list[tuple[float, float]]] = {}  # (sent, time to first token), in seconds
    for name, result in runs.items():
        for request in result["requests"]:
            if not request["error"] and request["ttft"] is not None:
                key = name if len(runs) > 1 else request["label"]
                curves.setdefault(key, []).append((request["sent"], request["ttft"]))
    if not curves:
        raise ResourceError("There is nothing to plot: no request was completed.")
    drawn = {"ttft-distribution.svg": distribution(curves), "ttft-over-time.svg": over_time(curves)}
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, text in drawn.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"--plot {folder} cannot be written: {error.strerror}.") from None
    return [Path(folder) / name for name in drawn]


def distribution(curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """The share of requests whose first token came within a time."""
    times = [max(_LEAST_SECONDS, ttft) for points in curves.values() for _, ttft in points]
    low, high = _decade(min(times), down=True), _decade(max(times), down=False)
    chart = Chart("Time to first token", (low, high), 1.0, logarithmic=True)
    chart.y_axis([(step / _STEPS, f"{step / _STEPS:.0%}") for step in range(_STEPS + 1)])
    chart.x_axis(_decades(low, high), "seconds, and the share of requests whose first token came within them")
    for name, points in curves.items():
        ordered = sorted(max(_LEAST_SECONDS, ttft) for _, ttft in points)
        steps = [(low, 0.0)]
        for number, seconds in enumerate(ordered, 1):
            steps += [(seconds, steps[-1][1]), (seconds, number / len(ordered))]
        chart.curve([*steps, (high, 1.0)])
        chart.named(name)
    return chart.svg()


def over_time(curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Each request: when it was sent, and its time to first token."""
    longest = _nice(max(ttft for points in curves.values() for _, ttft in points))
    last = _nice(max(sent for points in curves.values() for sent, _ in points))
    chart = Chart("Time to first token, over the run", (0.0, last), longest, logarithmic=False)
    chart.y_axis([(longest * step / _STEPS, f"{longest * step / _STEPS:.3g} s") for step in range(_STEPS + 1)])
    chart.x_axis(
        [(last * step / _STEPS, f"{last * step / _STEPS:.3g}") for step in range(_STEPS + 1)], "sent at, seconds"
    )
    for name, points in curves.items():
        chart.dots([(sent, ttft, f"{name}, sent at {sent:.1f} s: {ttft:.3f} s") for sent, ttft in points])
        chart.named(name)
    return chart.svg()


def _decade(seconds: float, *, down: bool) -> float:
    exponent = math.floor(math.log10(seconds))
    return 10.0**exponent if down else 10.0 ** (exponent + 1)


def _decades(low: float, high: float) -> list[tuple[float, str]]:
    count = round(math.log10(high / low))
    return [(low * 10**step, f"{low * 10**step:g}") for step in range(count + 1)]


def _nice(value: float) -> float:
    """The next of 1, 2, 5, 10 ... times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(value, _LEAST_SECONDS)))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value)
