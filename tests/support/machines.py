"""Two machines on one: each is a thread with a network and a /dev/shm of its own, and there is a cable between them.

with two_machines() as (a, b):
    server = a.run(lambda: CacheServer(...))
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from services.network import leave_network, with_own_memory

Value = TypeVar("Value")

CABLE = "cable"


class Machine:
    """What `run` calls, and the processes and threads that this starts, see its network and its shared memory alone."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"machine {address}")
        self.run(leave_network)
        self.run(with_own_memory)

    def run(self, call: Callable[[], Value]) -> Value:
        """Returns what it returns, or raises what it raises."""
        return self._thread.submit(call).result()

    def command(self, *words: str) -> None:
        self.run(lambda: subprocess.run(words, check=True))

    def connect(self, other: Machine) -> None:
        place = f"/proc/{os.getpid()}/task/{other.run(threading.get_native_id)}/ns/net"
        self.command("ip", "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", place)
        for machine in (self, other):
            machine.command("ip", "address", "add", f"{machine.address}/24", "dev", CABLE)
            machine.plug()

    def plug(self) -> None:
        self.command("ip", "link", "set", CABLE, "up")

    def unplug(self) -> None:
        """This machine has no network any more. The other one hears nothing, and is told nothing."""
        self.command("ip", "link", "set", CABLE, "down")

    def close(self) -> None:
        """What runs there is to have ended."""
        self._thread.shutdown()


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    a, b = Machine("10.77.0.1"), Machine("10.77.0.2")
    try:
        a.connect(b)
        yield a, b
    finally:
        a.close()
        b.close()
