"""For every test: what one changes for the whole process must not reach the next, and random tests have one seed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from seeds import FIXED_SEED, SEED

hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.register_profile("random", deadline=None, print_blob=True)
hypothesis.settings.load_profile("fixed" if SEED == FIXED_SEED else "random")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.stats.get("failed") and SEED != FIXED_SEED:
        terminalreporter.write_line(f"TEST_SEED={SEED} repeats this run's random tests.")


@pytest.fixture(scope="session", autouse=True)
def no_memory_is_left() -> Iterator[None]:
    """Servers that tests kill leave their L1 for a restart; when all tests are over nobody wants it."""
    yield
    for file in Path("/dev/shm").glob(f"lmcache-test-{os.getpid()}-*"):
        file.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def unconfigured_logs() -> Iterator[None]:
    """Commands send the package's log to their own stream; the next test captures it again."""
    yield
    logger = logging.getLogger("lmcache")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
