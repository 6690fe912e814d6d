"""NUMA nodes of L1: on which of them the kernel takes its pages, by mbind(2)."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from lmcache.errors import ConfigError, ResourceError

ONLINE = Path("/sys/devices/system/node/online")
_MAX_NODES = 1024
_MPOL_BIND, _MPOL_INTERLEAVE = 2, 3  # linux/mempolicy.h
_MBIND = {"x86_64": 237, "aarch64": 235}  # numbers of the system call
_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
_EXAMPLE = "such as interleave, interleave:0-1 or bind:0"

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class NumaPlacement:
    """`interleave`: pages go round the nodes; else they come from them alone, the first one that has room."""

    interleave: bool
    nodes: tuple[int, ...]

    def __str__(self) -> str:
        nodes = ",".join(str(node) for node in self.nodes)
        return f"interleaved over NUMA nodes {nodes}" if self.interleave else f"bound to NUMA nodes {nodes}"


def parse_nodes(text: str, limit: int = _MAX_NODES) -> tuple[int, ...]:
    """Numbers below `limit` in the kernel's form, 0-3,5: nodes, or CPUs. ValueError where it is none."""
    nodes: set[int] = set()
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        if not found:
            raise ValueError(f"{part!r} is no node and no range of nodes")
        first = int(found[1])
        last = int(found[2]) if found[2] else first
        if not first <= last < limit:
            raise ValueError(f"{part!r} is no range of nodes below {limit}")
        nodes.update(range(first, last + 1))
    return tuple(sorted(nodes))


def online_nodes() -> tuple[int, ...]:
    """The nodes of this machine; node 0 alone where the kernel knows no NUMA."""
    try:
        return parse_nodes(ONLINE.read_text())
    except (OSError, ValueError):
        return (0,)


def placement(text: str) -> NumaPlacement | None:
    """What --l1-numa says; None for "". ConfigError names what is wrong, and nodes that this machine has not."""
    if not text:
        return None
    mode, _, listed = text.partition(":")
    online = online_nodes()
    if mode not in ("interleave", "bind") or (mode == "bind" and not listed):
        raise ConfigError(f"--l1-numa must be interleave, interleave:NODES or bind:NODES, {_EXAMPLE}; got {text!r}.")
    try:
        nodes = parse_nodes(listed) if listed else online
    except ValueError as error:
        raise ConfigError(f"--l1-numa {text}: {error}; give nodes {_EXAMPLE}.") from None
    missing = [node for node in nodes if node not in online]
    if missing:
        shown = ", ".join(str(node) for node in online)
        raise ConfigError(f"--l1-numa {text}: this machine has no node {missing[0]}; it has {shown}.")
    if platform.machine() not in _MBIND:
        raise ConfigError(f"--l1-numa is not known on {platform.machine()}: start the server under numactl instead.")
    return NumaPlacement(mode == "interleave", nodes)


def place(address: int, size_bytes: int, wanted: NumaPlacement) -> None:
    """For pages that have not been taken yet: of a file in memory the kernel keeps this with the file, whoever touches
    it first. ResourceError where the kernel refuses."""
    words = (ctypes.c_ulong * (_MAX_NODES // 64))()
    for node in wanted.nodes:
        words[node // 64] |= 1 << node % 64
    mode = _MPOL_INTERLEAVE if wanted.interleave else _MPOL_BIND
    number = _MBIND[platform.machine()]
    if _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(size_bytes),
        ctypes.c_int(mode),
        words,
        ctypes.c_ulong(_MAX_NODES + 1),
        ctypes.c_uint(0),
    ):
        number = ctypes.get_errno()
        hint = " (this container may not place memory)" if number in (errno.EPERM, errno.ENOSYS) else ""
        raise ResourceError(
            f"L1 cannot be {wanted}: {os.strerror(number)}{hint}; choose other nodes of --l1-numa or leave it out."
        )
