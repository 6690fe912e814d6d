"""Where background threads run: beside the compute threads of a CPU engine instead of on top of one of them, and on the
NUMA node of the memory that they copy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from lmcache.memory.numa import parse_nodes

SYSFS = Path("/sys")
_MAX_CPUS = 1 << 16


def engine_cpus() -> set[int]:
    """The CPUs that this worker may use. Its own threads are pinned one to a CPU, so its parent is asked."""
    own = os.sched_getaffinity(0)
    try:
        return own | os.sched_getaffinity(os.getppid())
    except OSError:
        return own


def near_cpus(cpus: set[int], gpu_address: str = "", sysfs: Path = SYSFS) -> set[int]:
    """Those of `cpus` on the NUMA node of the GPU at this PCI address; without one, on the node of the calling thread's
    own CPUs. All of them where that node is not known, or none of them is on it."""
    node = _node_of_gpu(gpu_address, sysfs) if gpu_address else _node_of(os.sched_getaffinity(0), sysfs)
    near = cpus & _cpus_of(node, sysfs) if node is not None else set()
    return near or cpus


def _node_of_gpu(address: str, sysfs: Path) -> int | None:
    try:
        node = int((sysfs / "bus/pci/devices" / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _node_of(cpus: set[int], sysfs: Path) -> int | None:
    """The one that all of these are on."""
    try:
        nodes = parse_nodes((sysfs / "devices/system/node/online").read_text())
    except (OSError, ValueError):
        return None
    return next((node for node in nodes if cpus <= _cpus_of(node, sysfs)), None)


def _cpus_of(node: int, sysfs: Path) -> set[int]:
    try:
        return set(parse_nodes((sysfs / f"devices/system/node/node{node}/cpulist").read_text(), _MAX_CPUS))
    except (OSError, ValueError):
        return set()


@contextlib.contextmanager
def unpinned(cpus: set[int]) -> Iterator[None]:
    """Threads that the calling thread starts meanwhile may run on all of `cpus`: a thread inherits from its parent."""
    pinned = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:  # a cpuset that grew smaller since: stay where we are
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, pinned)
