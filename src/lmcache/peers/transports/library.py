"""What a transfer engine is to this server: a library that reads memory of another server, in a process of its own
(`library_process`, `library_main`).

They run apart for what they do to the process that has them: UCX ends it when a reader vanishes at the wrong moment, a
read that was given up goes on writing, and whoever reaches their ports gets at its memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from lmcache.core import limits
from lmcache.environment import SYSTEM
from lmcache.errors import ResourceError
from lmcache.l2.adapters import mooncake_client, nixl_agent

WHERE = "--p2p-transfer-engine"


class LibrarySettings(msgspec.Struct, frozen=True):
    """`host`: where others reach this server. `serves`: others read from the L1 file; else it is read into."""

    engine: str
    path: str
    size_bytes: int
    server_epoch: bytes
    host: str
    serves: bool


class Region(msgspec.Struct, frozen=True, array_like=True):
    """How a library reaches the registered L1 of another server. `name` and `metadata` are that library's own;
    `address` is where L1 begins in the process that registered it."""

    name: str
    metadata: bytes
    address: int
    size_bytes: int


class Ready(msgspec.Struct, frozen=True, array_like=True):
    """The first message of the process. `sentence`: why it cannot be used; "" otherwise."""

    region: bytes
    sentence: str


class Ranges(msgspec.Struct, frozen=True, array_like=True):
    """What to read: `targets` and `sources` are offsets in the L1 of this server and of the other one, u64 each as
    `sizes`. `region` is that of the other server, packed."""

    region: bytes
    targets: bytes
    sources: bytes
    sizes: bytes


class ReadOrder(msgspec.Struct, frozen=True, array_like=True):
    """`deadline`: until when it is to end, in seconds of the system's monotonic clock."""

    number: int
    ranges: Ranges
    deadline: float


class ReadEnd(msgspec.Struct, frozen=True, array_like=True):
    """`sentence`: why it failed; "" otherwise. `may_write`: it may still go on. `was_late`: it was not begun."""

    number: int
    sentence: str
    may_write: bool = False
    was_late: bool = False


class RefusedRead(Exception):
    """A read that was not begun, with the reason."""


class LateRead(Exception):
    """A read that was not begun, as it would hardly have ended in time."""


def refuse_late(deadline: float) -> None:
    """LateRead."""
    if SYSTEM.clock.monotonic() > deadline - limits.PEER_LEAST_READ_SECONDS:
        raise LateRead


class Library(Protocol):
    """Made of settings and the address at which the L1 file is mapped; has registered it as one region. ResourceError
    where it cannot. Thread-safe."""

    def region(self) -> Region: ...

    def read(
        self, region: Region, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], deadline: float
    ) -> None:
        """From addresses of the region to addresses here. RefusedRead, LateRead; OSError when it failed: it may still
        write."""


class _Package(NamedTuple):
    """`modules`: one of them has to be there."""

    distribution: str
    modules: Sequence[str]
    install: str


_PACKAGES: Mapping[str, _Package] = {
    "nixl": _Package("nixl", nixl_agent.BUILDS, nixl_agent.INSTALL),
    "mooncake_te": _Package("mooncake-transfer-engine-non-cuda", ("mooncake",), mooncake_client.INSTALL),
}
ENGINES = tuple(_PACKAGES)


def refuse_missing(engine: str) -> None:
    """ResourceError where the package of that transfer engine is not installed. Loads nothing."""
    package = _PACKAGES[engine]
    if not any(importlib.util.find_spec(module) for module in package.modules):
        raise ResourceError(
            f'{WHERE} {engine} needs the package "{package.distribution}", which is not installed; install it with '
            f"{package.install}, or use auto."
        )
