"""What simulations share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulation.logged_errors import LoggedErrors


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simulated-model")


@pytest.fixture
def errors() -> Iterator[LoggedErrors]:
    handler = LoggedErrors()
    logger = logging.getLogger("lmcache")
    logger.addHandler(handler)
    logger.propagate = False
    yield handler
    logger.removeHandler(handler)
