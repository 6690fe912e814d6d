"""`make test`: suites side by side, in two lanes of one suite after the other, with a table of results at the end.
`make unit`, which is `run_tests.py units`: units and the contract in more lanes than cores, of about the same length,
without what needs an engine or starts a server or a service, and what takes long, which `make test` alone runs.

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
# What `make unit` leaves to `make test`. Each file of tests is here or in one lane.
OF_ENGINES_AND_SERVERS = (
    "tests/contract/test_mooncake.py",
    "tests/contract/test_nixl_objects.py",
    "tests/contract/test_resp.py",
    "tests/contract/test_s3.py",
    "tests/unit/integration/vllm/test_connector.py",
    "tests/unit/integration/vllm/test_in_process_settings.py",
    "tests/unit/integration/vllm/test_kv_events.py",
    "tests/unit/kv_events/test_guide_subscriber.py",
    "tests/unit/l2/test_nixl_objects.py",
    "tests/unit/test_public_contracts.py",
)
LONG = (  # some seconds each, of processor or disk
    "tests/contract/test_nixl.py",
    "tests/unit/device/test_cuda.py",
    "tests/unit/docs/test_site.py",
    "tests/unit/fleet/test_prefixes.py",
    "tests/unit/l2/test_empty_folders.py",
    "tests/unit/l2/test_raw_crash.py",
    "tests/unit/scripts/test_check_thread_safety.py",
    "tests/unit/scripts/test_nightly.py",
    "tests/unit/simulation/test_simulation.py",
    "tests/unit/tiering/test_huge_prompt.py",
)
LEFT_TO_TEST = (*OF_ENGINES_AND_SERVERS, *LONG)
FEWER_STEPS = {
    "LMCACHE_CONTRACT_STEPS": "200",
    "TEST_CHARGE_STEPS": "300",
    "TEST_FLEET_FAULTS": "100",
    "TEST_FLEET_STEPS": "500",
    "TEST_LEDGER_STEPS": "300",
    "TEST_STORM_SECONDS": "0.7",
    "TEST_TIERING_ROUNDS": "250",
}


def _unit_suite(name: str, *paths: str, without: Sequence[str] = ()) -> Suite:
    ignored = (f"--ignore={path}" for path in (*without, *LEFT_TO_TEST))
    return Suite(name, (*WITHOUT_ENGINE, *paths, *ignored), environment=FEWER_STEPS)


# More lanes than cores: tests of one wait for threads, sockets and disks while others compute.
PARTS_OF_UNITS = {
    "units-of-l2": ("tests/unit/l2",),
    "contract": ("tests/contract",),
    "units-of-tiering": ("tests/unit/tiering", "tests/unit/transport", "tests/unit/service", "tests/unit/telemetry"),
    "units-of-engines": ("tests/unit/integration", "tests/unit/peers", "tests/unit/client", "tests/unit/memory"),
    "units-of-http": ("tests/unit/admin", "tests/unit/cli", "tests/unit/fleet"),
}
IN_PARTS = [path for paths in PARTS_OF_UNITS.values() for path in paths]
UNIT_LANES = (
    *((_unit_suite(name, *paths),) for name, paths in PARTS_OF_UNITS.items()),
    (_unit_suite("other-units", "tests/unit", without=IN_PARTS),),
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
