from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.disk import FaultyDisk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FaultyDisk]:
    disk = FaultyDisk(tmp_path)
    yield disk
    disk.close()
