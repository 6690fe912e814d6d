"""The Prometheus text of metrics with a series for each cache salt, of which there may be thousands.

The library makes an object of every sample before it writes it, which takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from prometheus_client import Counter, Gauge
from prometheus_client.utils import floatToGoString

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class _Line(NamedTuple):
    number: float
    series: str  # the metric and its labels
    text: str  # the whole line


class SaltSeries:
    """Writes one metric as the library does. Lines are kept, and of those that change what names them: most tenants do
    nothing between two scrapes, and while lines are made no other thread of the server runs. Thread-safe."""

    def __init__(self, metric: Counter | Gauge, salt_label: str, shown: Callable[[str], str]) -> None:
        """`shown` is what stands for a cache salt."""
        (family,) = metric.describe()
        self._metric = metric
        self._name = family.name + ("_total" if family.type == "counter" else "")
        self._heading = f"# HELP {self._name} {family.documentation}\n# TYPE {self._name} {family.type}\n"
        self._salt_label = salt_label
        self._shown = shown
        self._lines: dict[tuple[str, ...], _Line] = {}  # by the values of the labels

    def text(self) -> str:
        children: Any = self._metric._metrics
        known, lines = self._lines, {}
        for values, child in list(children.items()):
            number = child._value.get()
            line = known.get(values)
            if line is None or line.number != number:
                series = line.series if line is not None else self._series_of(values)
                line = _Line(number, series, f"{series} {floatToGoString(number)}\n")  # type: ignore[no-untyped-call]
            lines[values] = line
        self._lines = lines  # without those of salts that have gone
        return self._heading + "".join([line.text for line in lines.values()])

    def _series_of(self, values: tuple[str, ...]) -> str:
        labels = dict(zip(self._metric._labelnames, values, strict=True))
        labels[self._salt_label] = self._shown(labels[self._salt_label])
        shown = ",".join(f'{name}="{labels[name].translate(_ESCAPES)}"' for name in sorted(labels))
        return f"{self._name}{{{shown}}}"
