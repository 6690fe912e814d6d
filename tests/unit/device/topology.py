"""A made-up machine: its NUMA nodes and GPUs, as sysfs shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def make_topology(sysfs: Path, nodes: Sequence[str], gpus: Mapping[str, int]) -> Path:
    """Writes into `sysfs` and returns it. `nodes`: the CPUs of each, as the kernel lists them; `gpus`: the node of each
    PCI address, -1 where it is not known."""
    folder = sysfs / "devices/system/node"
    for number, cpus in enumerate(nodes):
        (folder / f"node{number}").mkdir(parents=True)
        (folder / f"node{number}/cpulist").write_text(f"{cpus}\n")
    (folder / "online").write_text(f"0-{len(nodes) - 1}\n")
    for address, node in gpus.items():
        device = sysfs / "bus/pci/devices" / address.lower()
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    return sysfs
