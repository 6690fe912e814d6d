"""Curves over an axis as an SVG drawing, readable in any browser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 44, 56
_COLOURS = ("#1f6fb4", "#d1490c", "#2a8f3c", "#7b4fa3", "#555555")


class Chart:
    """Points are (x, y) in the units of the axes; `y` begins at 0."""

    def __init__(self, title: str, x_bounds: tuple[float, float], y_top: float, *, logarithmic: bool) -> None:
        """`logarithmic`: the x axis, whose values are above 0 then."""
        self._logarithmic = logarithmic
        self._low, high = map(self._place, x_bounds)
        self._span = max(high - self._low, 1e-9)
        self._top = y_top
        self._legend: list[str] = []
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
            f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>',
        ]

    def _place(self, x: float) -> float:
        return math.log2(x) if self._logarithmic else x

    def _x(self, x: float) -> float:
        return _LEFT + (self._place(x) - self._low) / self._span * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, y: float) -> float:
        return _HEIGHT - _BOTTOM - y / self._top * (_HEIGHT - _TOP - _BOTTOM)

    def _colour(self) -> str:
        return _COLOURS[len(self._legend) % len(_COLOURS)]

    def y_axis(self, marks: Sequence[tuple[float, str]]) -> None:
        for y, text in marks:
            self._parts.append(_line(_LEFT, self._y(y), _WIDTH - _RIGHT, self._y(y), "#dddddd"))
            self._parts.append(
                f'<text x="{_LEFT - 8}" y="{self._y(y) + 4:.1f}" text-anchor="end">{escape(text)}</text>'
            )

    def x_axis(self, marks: Sequence[tuple[float, str]], title: str) -> None:
        for x, text in marks:
            self._parts.append(_line(self._x(x), _HEIGHT - _BOTTOM, self._x(x), _HEIGHT - _BOTTOM + 5, "#333333"))
            self._parts.append(
                f'<text x="{self._x(x):.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{escape(text)}</text>'
            )
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        self._parts.append(f'<text x="{middle}" y="{_HEIGHT - 12}" text-anchor="middle">{escape(title)}</text>')

    def level(self, y: float, text: str) -> None:
        """A dashed line from side to side."""
        self._parts.append(_line(_LEFT, self._y(y), _WIDTH - _RIGHT, self._y(y), "#888888", dashes="6 4"))
        self._parts.append(
            f'<text x="{_WIDTH - _RIGHT + 8}" y="{self._y(y) - 6:.1f}" fill="#666666">{escape(text)}</text>'
        )

    def curve(self, points: Sequence[tuple[float, float]]) -> None:
        path = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{self._colour()}" stroke-width="2"/>')

    def dots(self, points: Sequence[tuple[float, float, str]]) -> None:
        """(x, y, what a pointer over it shows) of each."""
        self._parts += [
            f'<circle cx="{self._x(x):.1f}" cy="{self._y(y):.1f}" r="3" fill="{self._colour()}">'
            f"<title>{escape(text)}</title></circle>"
            for x, y, text in points
        ]

    def named(self, name: str) -> None:
        """What was drawn since the last name stands in the legend, and the next colour begins."""
        self._legend.append(name)

    def svg(self) -> str:
        parts = list(self._parts)
        for number, name in enumerate(self._legend):
            y = _HEIGHT - _BOTTOM - 20 * (len(self._legend) - number)
            colour = _COLOURS[number % len(_COLOURS)]
            parts.append(_line(_WIDTH - _RIGHT + 8, y, _WIDTH - _RIGHT + 28, y, colour, width=2))
            parts.append(f'<text x="{_WIDTH - _RIGHT + 34}" y="{y + 4}">{escape(name)}</text>')
        return "\n".join([*parts, "</svg>"]) + "\n"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: int = 1, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"{dashed}/>'
    )
