"""Runs the tests that take long, part by part, and reports the result of each. A failed part does not end the others.

Arguments are names of parts (none: all of them); what follows `--` goes to pytest: `nightly.py shapes -- -k mla`.
Random tests get a new seed in each run; TEST_SEED repeats one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from results import Outcome, exit_code, table

ROOT = Path(__file__).resolve().parent.parent
SEED = os.environ.get("TEST_SEED") or str(int(time.time()))
NOTHING_COLLECTED = 5  # pytest's exit code


@dataclass(frozen=True)
class Run:
    """One pytest."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


SLOW = ("-m", "slow")
SHAPES = "tests/e2e/test_shapes.py"
STOPS = "tests/process/test_stop.py"
PARTS: dict[str, tuple[Run, ...]] = {
    "shapes": (Run((SHAPES, *SLOW)),),
    "engine": (Run(("tests/e2e", *SLOW, f"--ignore={SHAPES}")),),
    "faults": (
        Run(("tests/faults", *SLOW)),
        Run(("tests/faults/test_power_cut.py",), {"TEST_POWER_CUTS": "200"}),
    ),
    "kill": (
        Run(("tests/process/test_kill_loop.py",), {"TEST_KILL_ROUNDS": "200"}),
        Run((STOPS,), {"TEST_STOP_ROUNDS": "300"}),
    ),
    "simulation": (
        Run(("tests/simulation",), {"TEST_SIMULATION_STEPS": "100000", "TEST_SIMULATED_RUNS": "50"}),
        Run(("tests/unit/fleet/test_event_faults.py",), {"TEST_FLEET_FAULTS": "45000"}),
    ),
    "contract": (
        Run(
            ("tests/contract", "-k", "like_a_dictionary"),
            {"LMCACHE_CONTRACT_STEPS": "50000", "LMCACHE_CONTRACT_SEED": SEED},
        ),
    ),
    "http": (
        Run(
            ("tests/process/test_http_fuzz.py",), {"TEST_HTTP_EXAMPLES": "300", "TEST_HTTP_FAULTY_REQUESTS": "1000000"}
        ),
        Run(("tests/process/test_coordinator_fuzz.py",), {"TEST_HTTP_EXAMPLES": "100"}),
        Run(("tests/process/test_hostile.py", "-k", "nearly_right"), {"TEST_HOSTILE_MESSAGES": "1000000"}),
    ),
    "random": (
        Run(
            ("tests/unit", "-m", "not slow", f"--hypothesis-seed={SEED}"),
            {"TEST_LEDGER_STEPS": "100000", "TEST_FLEET_STEPS": "100000"},
        ),
    ),
    "cap": (
        Run(("tests/process/test_cap.py",), {"TEST_CAP_STORE_GB": "10"}),
        Run(("tests/process/test_many_salts.py",), {"TEST_SALTS": "200000"}),
    ),
    "others": (Run(("tests", *SLOW, *(f"--ignore={path}" for path in ("tests/e2e", "tests/faults", STOPS)))),),
}


def run_pytest(run: Run, extra: Sequence[str]) -> int:
    command = [sys.executable, "-m", "pytest", *run.arguments, *extra]
    environment = {"TEST_SEED": SEED, "TEST_SERVICES_REQUIRED": "1", **run.environment}
    settings = [f"{name}={value}" for name, value in environment.items()]
    print("$", *settings, *command[1:], flush=True)
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}).returncode
    return 0 if code == NOTHING_COLLECTED and extra else code


def run_parts(names: Sequence[str], run: Callable[[Run], int], say: Callable[[str], None] = print) -> list[Outcome]:
    """Every part, whatever the others came to; those behind an interruption are not run."""
    outcomes = [Outcome(name) for name in names]
    for outcome in outcomes:
        say(f"==== {outcome.suite}")
        began = time.monotonic()
        try:
            codes = [run(each) for each in PARTS[outcome.suite]]
            outcome.result = "failed" if any(codes) else "passed"
        except KeyboardInterrupt:
            outcome.result = "interrupted"
        outcome.seconds = time.monotonic() - began
        say(f"==== {outcome.suite}: {outcome.result} after {outcome.seconds:.0f} s")
        if outcome.result == "interrupted":
            break
    return outcomes


def main(arguments: Sequence[str]) -> int:
    names, extra = _split(arguments)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"There is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}.", file=sys.stderr)
        return 2
    outcomes = run_parts(names or list(PARTS), lambda run: run_pytest(run, extra))
    print(table(outcomes))
    return exit_code(outcomes)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(parts, what pytest gets)."""
    given = list(arguments)
    end = given.index("--") if "--" in given else len(given)
    return given[:end], given[end + 1 :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
