"""`make nightly`: one failure ends nothing, and is in the end known."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "nightly.py"


@pytest.fixture(scope="module")
def nightly() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nightly", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_part_that_fails_does_not_end_the_others(nightly: ModuleType) -> None:
    ran = []

    def run(each) -> int:
        ran.append(each)
        return int(each is nightly.PARTS["faults"][0])

    outcomes = nightly.run_parts(list(nightly.PARTS), run, say=lambda _: None)
    assert ran == [run for part in nightly.PARTS.values() for run in part]
    assert {outcome.part for outcome in outcomes if outcome.result == "failed"} == {"faults"}
    assert all(outcome.result == "passed" for outcome in outcomes if outcome.part != "faults")
    assert re.search(r"^faults +failed +0 s$", nightly.summary(outcomes), re.MULTILINE)


def test_what_an_interruption_leaves_out_is_told(nightly: ModuleType) -> None:
    def run(each) -> int:
        raise KeyboardInterrupt

    outcomes = nightly.run_parts(["kill", "cap"], run, say=lambda _: None)
    assert [outcome.result for outcome in outcomes] == ["interrupted", "not run"]


def test_the_makefile_has_a_target_for_every_part(nightly: ModuleType) -> None:
    targets = re.findall(r"^nightly-([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets == list(nightly.PARTS)
    for part in nightly.PARTS.values():
        assert all((ROOT / run.arguments[0]).exists() for run in part)


def test_a_part_is_run_alone_and_its_result_is_the_exit_code() -> None:
    def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=120)

    empty = ended("contract", "--", "-k", "nosuchtest")
    assert (empty.returncode, "contract    passed" in empty.stdout, "shapes" in empty.stdout) == (0, True, False)
    broken = ended("contract", "cap", "--", "--no-such-option")
    assert broken.returncode == 1
    assert re.search(r"contract +failed .*\ncap +failed", broken.stdout)
    unknown = ended("contrakt")
    assert unknown.returncode == 2 and unknown.stderr.startswith("There is no part 'contrakt'; the parts are shapes,")
