"""`make nightly`: one failure ends nothing, and is in the end known."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nightly
from results import table

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "nightly.py"


def test_a_part_that_fails_does_not_end_the_others() -> None:
    ran = []

    def run(each: nightly.Run) -> int:
        ran.append(each)
        return int(each is nightly.PARTS["faults"][0])

    outcomes = nightly.run_parts(list(nightly.PARTS), run, say=lambda _: None)
    assert ran == [run for part in nightly.PARTS.values() for run in part]
    assert {outcome.suite for outcome in outcomes if outcome.result == "failed"} == {"faults"}
    assert all(outcome.result == "passed" for outcome in outcomes if outcome.suite != "faults")
    assert re.search(r"^faults +\| +0 \| failed$", table(outcomes), re.MULTILINE)


def test_what_an_interruption_leaves_out_is_reported() -> None:
    def run(each: nightly.Run) -> int:
        raise KeyboardInterrupt

    outcomes = nightly.run_parts(["kill", "cap"], run, say=lambda _: None)
    assert [outcome.result for outcome in outcomes] == ["interrupted", "not run"]


def test_the_makefile_has_a_target_for_every_part() -> None:
    targets = re.findall(r"^nightly-([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets == list(nightly.PARTS)
    for part in nightly.PARTS.values():
        assert all((ROOT / run.arguments[0]).exists() for run in part)


def test_a_part_is_run_alone_and_its_result_is_the_exit_code() -> None:
    def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=120)

    empty = ended("contract", "--", "-k", "nosuchtest")
    assert (empty.returncode, "| passed" in empty.stdout, "shapes" in empty.stdout) == (0, True, False)
    broken = ended("contract", "random", "--", "--no-such-option")
    assert broken.returncode == 1
    assert re.search(r"contract .*\| failed\nrandom .*\| failed", broken.stdout)
    unknown = ended("contrakt")
    assert unknown.returncode == 2 and unknown.stderr.startswith("There is no part 'contrakt'; the parts are shapes,")


def test_what_tests_read_has_no_name_of_a_server_s_option() -> None:
    """A server warns of variables that are named like its options and are none; it has the environment of its test."""
    read = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("tests", "scripts")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in re.findall(r"environ(?:\.get\(|\[)\"(LMCACHE_\w+)", path.read_text())
    ]
    assert not read
