"""What the engine's side of the wire takes from its process and machine, as one value."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmcache import _native
from lmcache.environment import Environment
from lmcache.transport.connection import Connection


@dataclass(frozen=True)
class EngineEnvironment(Environment):
    """Makes all that can wait: a simulation, which decides what happens when, passes its own."""

    thread: Callable[..., threading.Thread] = threading.Thread
    lock: Callable[[], threading.Lock] = threading.Lock
    condition: Callable[[], threading.Condition] = threading.Condition
    event: Callable[[], threading.Event] = threading.Event
    queue: Callable[[], queue.SimpleQueue[Any]] = queue.SimpleQueue
    connection: Callable[..., Connection] = Connection
    copier: Callable[..., _native.PagedCopier] = _native.PagedCopier


ENGINE_SYSTEM = EngineEnvironment()
