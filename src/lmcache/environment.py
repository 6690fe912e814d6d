"""Time and randomness as one value, for what needs both."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from lmcache.clock import Clock, SystemClock


@dataclass(frozen=True)
class Environment:
    """What an object takes from the machine. A test passes its own."""

    clock: Clock = field(default_factory=SystemClock)
    random_bytes: Callable[[int], bytes] = os.urandom  # gives that many bytes, which nobody can guess


SYSTEM = Environment()
