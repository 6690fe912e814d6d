"""For every test: what one changes for the whole process must not reach the next."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def unconfigured_logs() -> Iterator[None]:
    """Commands send the package's log to their own stream; the next test captures it again."""
    yield
    logger = logging.getLogger("lmcache")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
