"""No fault ends a task unnoticed."""

from __future__ import annotations

import asyncio
import logging

import pytest

from lmcache.errors import AdapterError
from lmcache.l2.background import spawn


@pytest.mark.parametrize(
    ("fault", "level"),
    [(ValueError("ours"), "ERROR"), (OSError("a disk's"), "WARNING"), (AdapterError("its"), "WARNING")],
)
def test_a_fault_that_ends_a_task_is_logged(fault: Exception, level: str, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise fault

    async def run() -> None:
        await asyncio.wait({spawn(fail(), "sweep")})

    asyncio.run(run())
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == (level, "The task sweep ended by a fault")
    assert record.exc_info is not None and record.exc_info[1] is fault


def test_the_end_of_a_task_that_is_cancelled_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def run() -> None:
        task = spawn(asyncio.sleep(3600), "sweep")
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(run())
    assert not [record for record in caplog.records if record.name.startswith("lmcache")]
