"""`make test`: every folder of tests is in a lane, and a suite that fails ends neither its lane nor the other.
`make unit`: what it leaves out has a name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from results import exit_code, table
from run_tests import LANES, LEFT_TO_TEST, MOST_AGAIN, UNIT_LANES, Suite, run_lanes

TESTS = Path(__file__).parents[2]
UNITS = ("unit", "contract")
NEEDS_MORE = re.compile(  # an engine when it is imported, a server or a service when it is run
    r"^(?:from|import) (?:vllm\b|process\.(?:support|nursery)\b|services\.(?!certificates\b)\w+)"
    r"|^from services import .*\b(?:azurite|mooncake|redis|seaweedfs)\b|^(?:\w+ = )?pytest\.importorskip\(.vllm"
    r"|\bCacheServer\(",
    re.MULTILINE,
)


def test_every_folder_of_tests_is_in_one_lane() -> None:
    folders = {f"tests/{file.relative_to(TESTS).parts[0]}" for file in TESTS.rglob("test_*.py")}
    named = [word for lane in LANES for suite in lane for word in suite.command if word.startswith("tests/")]
    assert sorted(named) == sorted(folders)


def files_of(suite: Suite) -> list[str]:
    ignored = [word.removeprefix("--ignore=") for word in suite.command if word.startswith("--ignore=")]
    files = [
        str(file.relative_to(TESTS.parent))
        for word in suite.command
        if word.startswith("tests/")
        for file in (TESTS.parent / word).rglob("test_*.py")
    ]
    return [file for file in files if not any(file == path or file.startswith(f"{path}/") for path in ignored)]


def test_every_unit_test_is_in_one_lane_or_left_to_make_test_by_name() -> None:
    files = [str(file.relative_to(TESTS.parent)) for part in UNITS for file in (TESTS / part).rglob("test_*.py")]
    in_lanes = [file for lane in UNIT_LANES for suite in lane for file in files_of(suite)]
    assert sorted([*in_lanes, *LEFT_TO_TEST]) == sorted(files)


def test_make_unit_needs_no_engine_and_starts_no_server() -> None:
    """Single tests that are marked `engine` are left out; a file that cannot be read without one is to be named."""
    for file in (file for lane in UNIT_LANES for suite in lane for file in files_of(suite)):
        found = NEEDS_MORE.search((TESTS.parent / file).read_text())
        assert not found, f"{file} has {found[0].strip()!r}: name it in OF_ENGINES_AND_SERVERS"
    for suite in (suite for lane in UNIT_LANES for suite in lane):
        assert suite.command[suite.command.index("-m", 3) + 1] == "not slow and not engine"


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
