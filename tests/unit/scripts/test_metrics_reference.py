"""The page of metrics says what the sources declare, the dashboard shows all of it, and tests see each metric move."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache.core.outcome import MissReason

ROOT = Path(__file__).parents[3]
REFERENCE = (ROOT / "docs" / "reference" / "metrics.md").read_text()
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
NAMES = re.findall(r"^\| `(lmcache_mp_\w+)` \|", REFERENCE, re.MULTILINE)
LISTS = ("test_metrics_reference.py", "test_prometheus_rules.py")  # name metrics without moving them


@pytest.mark.parametrize("script", ["write_metrics_reference.py", "write_grafana_dashboard.py"])
def test_what_is_made_from_the_declarations_is_current(script: str) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / script), "--check"], check=False)
    assert done.returncode == 0, f"run scripts/{script}"


def test_each_section_of_the_reference_has_a_title_of_its_own() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert len(titles) == len(set(titles)), titles


def test_the_dashboard_shows_every_metric() -> None:
    shown = set(re.findall(r"lmcache_mp_\w+", (ROOT / "deploy" / "grafana" / "lmcache.json").read_text()))
    assert len(NAMES) > 80
    assert [name for name in NAMES if not {name, f"{name}_bucket"} & shown] == []


def names_in_tests() -> set[str]:
    """Metrics that a test names in a string that is not its docstring."""
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        if "lmcache_mp_" not in text or path.name in LISTS:
            continue
        nodes = list(ast.walk(ast.parse(text)))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in docstrings:
                found.update(re.findall(r"lmcache_mp_\w+", str(node.value)))
    return found


def test_each_metric_is_named_by_a_test_that_moves_it() -> None:
    """Most by tests/process/test_metrics.py, which has a cause for each."""
    named = names_in_tests()
    histograms = {name.removesuffix("_count") for name in named if name.endswith("_count")}
    assert [name for name in NAMES if name not in named | histograms] == []


def first_column(page: str, heading: str) -> list[str]:
    """Of the table with that heading in its first column: the words in backquotes."""
    rows = page.split(f"| {heading} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [word for row in rows for word in re.findall(r"`(\w+)`", row.split("|")[1])]


def is_of_a_miss(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr == "miss_reason" for part in ast.walk(node))


def reasons_in(path: Path) -> set[str]:
    """Reasons that a test expects of a lookup, and those of the counter that it expects of a real server."""
    text, found = path.read_text(), set[str]()
    if "miss_reason" not in text and "lmcache_mp_misses_total" not in text:
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare) and is_of_a_miss(node.left):
            for part in (part for side in node.comparators for part in ast.walk(side)):
                if isinstance(part, ast.Attribute) and part.attr in MissReason.__members__:
                    found.add(MissReason[part.attr].value)
                elif isinstance(part, ast.Constant):
                    found.add(str(part.value))
        elif isinstance(node, ast.Constant) and "process" in path.parts:
            found.update(re.findall(r'lmcache_mp_misses_total\{reason="(\w+)"\}', str(node.value)))
    return found


def test_pages_name_the_reasons_of_misses_that_there_are_and_no_other() -> None:
    reasons = [reason.value for reason in MissReason]
    assert sorted(first_column(REFERENCE, "reason")) == sorted(reasons)
    assert set(first_column(TROUBLESHOOTING, "reason")) <= set(reasons)


def test_each_reason_of_a_miss_is_expected_by_a_test() -> None:
    """The counter has a series for each from the start, so that only a test tells whether something still causes it."""
    expected = set[str]().union(*(reasons_in(path) for path in (ROOT / "tests").rglob("*.py")))
    assert [reason.value for reason in MissReason if reason.value not in expected] == []
