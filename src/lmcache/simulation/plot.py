"""Hit rate against size as an SVG drawing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lmcache.core.limits import GIB
from lmcache.simulation.chart import Chart


def draw(title: str, curves: Mapping[str, Sequence[tuple[int, float]]], ceiling: float) -> str:
    """`curves`: for each policy (size in bytes, hit rate from 0 to 1), sizes above 0. The x axis is logarithmic."""
    sizes = sorted({size for points in curves.values() for size, _ in points})
    top = max([ceiling, *(rate for points in curves.values() for _, rate in points)])
    highest = min(1.0, math.ceil(max(top, 0.05) * 10) / 10)
    chart = Chart(title, (sizes[0], sizes[-1]), highest, logarithmic=True)
    chart.y_axis([(step / 10, f"{step / 10:.0%}") for step in range(round(highest * 10) + 1)])
    chart.x_axis([(size, f"{size / GIB:.3g}") for size in sizes], "size of the tier, GB (2^30 bytes)")
    chart.level(ceiling, f"endless: {ceiling:.1%}")
    for policy, points in curves.items():
        chart.curve(sorted(points))
        chart.dots([(size, rate, f"{policy}, {size / GIB:.3g} GB: {rate:.2%}") for size, rate in points])
        chart.named(policy)
    return chart.svg()
