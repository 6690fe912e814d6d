"""How tests wait for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# That a machine with other work may let a process stand still: a limit for what must come soon has room for it.
STALL_SECONDS = 5.0


def until(condition: Callable[[], Any], seconds: float = 60.0, *, tell: Callable[[], object] = str) -> Any:
    """Polls until the condition holds and returns its value. `tell`: what to say of the state when it never does."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not so within {seconds:g} s {tell()}"
        time.sleep(0.005)
    return value
