"""`make test`: suites side by side, in two lanes of one suite after the other, with a table of results at the end.
`make unit`, which is `run_tests.py units`: those of units alone, in two lanes of about the same length.

Tests with engines and servers mostly wait for one process that starts, so the second lane, at a lower priority, has a
core to itself. A suite that fails does not end the others. What a suite prints goes to build/logs; of one that fails
the end is shown.

Many tests wait for engines, servers and threads, and have deadlines, which a machine that runs all suites at once may
miss. The few of a suite that failed run once more when nothing runs beside them; the table names how many passed only
then, and what they printed first stays in the log. A test that fails twice has failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from results import Outcome, exit_code, table

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "logs"
SHOWN_LINES = 200  # of a suite that failed
MOST_AGAIN = 3  # more failures of a suite are no accident of a loaded machine
REQUIRED = {"TEST_SERVICES_REQUIRED": "1"}  # tests/services: what is missing is a failure
PYTEST = (sys.executable, "-m", "pytest", "-m", "not slow")
WITHOUT_ENGINE = (*PYTEST[:-1], "not slow and not engine")


@dataclass(frozen=True)
class Suite:
    name: str
    command: tuple[str, ...]
    niceness: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


LANES = (
    (
        Suite("engines", (*PYTEST, "tests/e2e", "tests/gpu", "tests/hicache"), environment=REQUIRED),
        Suite("processes", (*PYTEST, "tests/process"), environment=REQUIRED),
    ),
    (
        Suite("C++", ("make", "--no-print-directory", "native-test"), niceness=5),
        Suite("units", (*PYTEST, "tests/unit", "tests/contract", "tests/simulation", "tests/services"), 5, REQUIRED),
        Suite("faults", (*PYTEST, "tests/faults"), environment=REQUIRED),
    ),
)
L2 = "tests/unit/l2"  # and the contract: half of what the units take
UNIT_LANES = (
    (Suite("units-of-l2", (*WITHOUT_ENGINE, L2, "tests/contract")),),
    (Suite("other-units", (*WITHOUT_ENGINE, "tests/unit", f"--ignore={L2}")),),
)


def run_suite(suite: Suite) -> tuple[bool, str]:
    """(whether it passed, what it printed)."""
    LOGS.mkdir(parents=True, exist_ok=True)
    path = LOGS / f"{suite.name}.log"
    command = ["nice", "-n", str(suite.niceness), *suite.command]
    with path.open("wb") as log:
        environment = {**os.environ, **suite.environment}
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)
    passed = done.returncode == 0
    return passed, path.read_text(errors="replace")


def run_lanes(lanes: Sequence[Sequence[Suite]], run: Callable[[Suite], tuple[bool, str]] = run_suite) -> list[Outcome]:
    outcomes = {suite.name: Outcome(suite.name) for lane in lanes for suite in lane}
    repeated: list[tuple[Suite, list[str]]] = []

    def run_lane(lane: Sequence[Suite]) -> None:
        for suite in lane:
            print(f"==== {suite.name}: started, prints to {LOGS.relative_to(ROOT)}/{suite.name}.log", flush=True)
            began = time.monotonic()
            passed, output = run(suite)
            result, seconds = "passed" if passed else "failed", time.monotonic() - began
            outcomes[suite.name] = Outcome(suite.name, result, seconds)
            end = output.rstrip().splitlines()[-(1 if passed else SHOWN_LINES) :]
            print("\n".join([f"==== {suite.name}: {result} after {seconds:.0f} s", *end]), flush=True)
            failed = [] if passed else failed_tests(output)
            if 0 < len(failed) <= MOST_AGAIN:
                repeated.append((suite, failed))

    threads = [threading.Thread(target=run_lane, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for suite, tests in repeated:
        print("\n".join([f"==== {suite.name}: again, alone:", *tests]), flush=True)
        passed, output = run(alone(suite, tests))
        print(output.rstrip(), flush=True)
        if passed:
            outcomes[suite.name].repeated = len(tests)
            outcomes[suite.name].result = "passed"
    return list(outcomes.values())


def failed_tests(output: str) -> list[str]:
    """The names in pytest's short summary; what a test is run with, in brackets, may have spaces."""
    found = re.findall(r"^(?:FAILED|ERROR) (tests/[^\s\[]+(?:\[.*?\])?)(?: - .*)?$", output, re.MULTILINE)
    return list(dict.fromkeys(found))


def alone(suite: Suite, tests: Sequence[str]) -> Suite:
    """A suite of some of its tests."""
    options = [word for word in suite.command if not word.startswith("tests/")]
    return replace(suite, name=f"{suite.name}-again", command=(*options, *tests))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", nargs="?", choices=["units"], help="without engines and servers; default: everything")
    outcomes = run_lanes(UNIT_LANES if parser.parse_args().part else LANES)
    print(table(outcomes))
    return exit_code(outcomes)


if __name__ == "__main__":
    sys.exit(main())
