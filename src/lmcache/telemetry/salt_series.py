"""The Prometheus text of metrics with a series for each cache salt, of which there may be thousands.

The library makes an object of every sample before it writes it, which takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from prometheus_client import Counter, Gauge
from prometheus_client.utils import floatToGoString

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


_KEPT = 8192  # several metrics have the same labels


def text(metric: Counter | Gauge, salt_label: str, shown: Callable[[str], str]) -> str:
    """As the library writes it. `shown` is what stands for a cache salt."""
    (family,) = metric.describe()
    name = family.name + ("_total" if family.type == "counter" else "")
    names = tuple(metric._labelnames)
    lines = [f"# HELP {name} {family.documentation}\n# TYPE {name} {family.type}\n"]
    children: Any = metric._metrics
    for values, child in list(children.items()):
        number = floatToGoString(child._value.get())  # type: ignore[no-untyped-call]
        lines.append(f"{name}{_labels(names, values, salt_label, shown)} {number}\n")
    return "".join(lines)


@lru_cache(_KEPT)
def _labels(names: tuple[str, ...], values: tuple[str, ...], salt_label: str, shown: Callable[[str], str]) -> str:
    texts = {name: shown(value) if name == salt_label else value for name, value in zip(names, values, strict=True)}
    return "{" + ",".join(f'{name}="{texts[name].translate(_ESCAPES)}"' for name in sorted(names)) + "}"
