"""`make test`: every folder of tests is in a lane, and a suite that fails ends neither its lane nor the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from results import exit_code, table
from run_tests import LANES, MOST_AGAIN, UNIT_LANES, Suite, run_lanes

TESTS = Path(__file__).parents[2]


def test_every_folder_of_tests_is_in_one_lane() -> None:
    folders = {f"tests/{file.relative_to(TESTS).parts[0]}" for file in TESTS.rglob("test_*.py")}
    named = [word for lane in LANES for suite in lane for word in suite.command if word.startswith("tests/")]
    assert sorted(named) == sorted(folders)


def test_every_unit_test_is_in_one_lane_of_their_own() -> None:
    (of_l2,), (others,) = UNIT_LANES
    left_out = {word.removeprefix("--ignore=") for word in others.command if word.startswith("--ignore=")}
    assert {word for word in others.command if word.startswith("tests/")} == {"tests/unit"}
    assert {word for word in of_l2.command if word.startswith("tests/")} == {*left_out, "tests/contract"}
    assert all((TESTS.parent / path).is_dir() for path in left_out)


def test_a_suite_that_fails_ends_no_other_one(capsys: pytest.CaptureFixture[str]) -> None:
    lanes = [[Suite("a", ()), Suite("b", ())], [Suite("c", ())]]
    outcomes = run_lanes(lanes, lambda suite: (suite.name != "a", f"first line of {suite.name}\nlast line"))
    results = {outcome.suite: outcome.result for outcome in outcomes}
    assert results == {"a": "failed", "b": "passed", "c": "passed"}
    printed = capsys.readouterr().out
    assert "first line of a" in printed and "first line of b" not in printed


@pytest.mark.parametrize("passes_alone", [True, False])
@pytest.mark.parametrize("failures", [0, 1, MOST_AGAIN, MOST_AGAIN + 1])
def test_the_few_that_fail_beside_others_run_again_alone(passes_alone: bool, failures: int) -> None:
    names = [f"tests/process/test_a.py::test_b[of {number} - c]" for number in range(failures)]
    summary = "\n".join(f"FAILED {name} - AssertionError: x" for name in names)
    ran: list[tuple[str, ...]] = []

    def run(suite: Suite) -> tuple[bool, str]:
        ran.append(suite.command)
        return (passes_alone, "alone") if len(ran) > 1 else (False, f"{summary}\n1 failed")

    outcomes = run_lanes([[Suite("a", ("pytest", "tests/process"))]], run)
    again = 0 < failures <= MOST_AGAIN
    assert ran == [("pytest", "tests/process"), *([("pytest", *names)] if again else [])]
    assert exit_code(outcomes) == (0 if again and passes_alone else 1)
    assert ("only when run again alone" in table(outcomes)) == (again and passes_alone)
