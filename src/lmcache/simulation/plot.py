"""Hit rate against size as an SVG drawing, readable in any browser."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from lmcache.core.limits import GIB

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 44, 56
_COLOURS = ("#1f6fb4", "#d1490c", "#2a8f3c", "#7b4fa3", "#555555")


def draw(title: str, curves: Mapping[str, Sequence[tuple[int, float]]], ceiling: float) -> str:
    """`curves`: for each policy (size in bytes, hit rate from 0 to 1), sizes above 0. The x axis is logarithmic."""
    sizes = [size for points in curves.values() for size, _ in points]
    low, high = math.log2(min(sizes)), math.log2(max(sizes))
    span = max(high - low, 1e-9)
    top = max([ceiling, *(rate for points in curves.values() for _, rate in points)])
    highest = min(1.0, math.ceil(max(top, 0.05) * 10) / 10)

    def x(size: float) -> float:
        return _LEFT + (math.log2(size) - low) / span * (_WIDTH - _LEFT - _RIGHT)

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate / highest * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for step in range(round(highest * 10) + 1):
        rate = step / 10
        parts.append(_line(_LEFT, y(rate), _WIDTH - _RIGHT, y(rate), "#dddddd"))
        parts.append(f'<text x="{_LEFT - 8}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:.0%}</text>')
    for size in sorted(set(sizes)):
        parts.append(_line(x(size), _HEIGHT - _BOTTOM, x(size), _HEIGHT - _BOTTOM + 5, "#333333"))
        label = f"{size / GIB:.3g}"
        parts.append(f'<text x="{x(size):.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{label}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 12}" text-anchor="middle">size of the tier, GB (2^30 bytes)</text>')
    parts.append(_line(_LEFT, y(ceiling), _WIDTH - _RIGHT, y(ceiling), "#888888", dashes="6 4"))
    parts.append(
        f'<text x="{_WIDTH - _RIGHT + 8}" y="{y(ceiling) - 6:.1f}" fill="#666666">endless: {ceiling:.1%}</text>'
    )
    for number, (policy, points) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x(size):.1f},{y(rate):.1f}" for size, rate in sorted(points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x(size):.1f}" cy="{y(rate):.1f}" r="3" fill="{colour}">'
            f"<title>{escape(policy)}, {size / GIB:.3g} GB: {rate:.2%}</title></circle>"
            for size, rate in points
        ]
        legend = _HEIGHT - _BOTTOM - 20 * (len(curves) - number)
        parts.append(_line(_WIDTH - _RIGHT + 8, legend, _WIDTH - _RIGHT + 28, legend, colour, width=2))
        parts.append(f'<text x="{_WIDTH - _RIGHT + 34}" y="{legend + 4}">{escape(policy)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: int = 1, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"{dashed}/>'
    )
