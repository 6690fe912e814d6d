"""Plain programs of the transfer engines: one registers memory, the other reads it with one call for all ranges.
Nothing is verified, and nobody waits for a deadline."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lmcache.clock import SystemClock

LOOPBACK = "127.0.0.1"
PAUSE_SECONDS = 20e-6  # between two looks at a transfer


class PlainEngine(Protocol):
    """Has registered memory. `described` is what a reader needs beside the address."""

    described: tuple[str, bytes]

    def read(self, owner: tuple[str, bytes], targets: Sequence[int], sources: Sequence[int], size_bytes: int) -> None:
        """Ranges of equal size."""


class PlainNixl:
    def __init__(self, address: int, size_bytes: int, *, serves: bool) -> None:
        """One that reads has no thread of its own, which costs it more than half of its rate over TCP."""
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
        self._nixl: Any = importlib.import_module("nixl_cu12._bindings")
        config = self._nixl.nixlAgentConfig(serves, False, 0, self._nixl.NIXL_THREAD_SYNC_STRICT)
        self._agent = self._nixl.nixlAgent(f"plain-{os.getpid()}-{address}", config)
        self._backend = self._agent.createBackend("UCX", {})
        self._agent.registerMem(
            self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, size_bytes, 0, "")]), [self._backend]
        )
        self.described = "", self._agent.getLocalMD()
        self._names: dict[bytes, str] = {}

    def read(self, owner: tuple[str, bytes], targets: Sequence[int], sources: Sequence[int], size_bytes: int) -> None:
        nixl, clock = self._nixl, SystemClock()
        name = self._names.get(owner[1]) or self._names.setdefault(
            owner[1], self._agent.loadRemoteMD(owner[1]).decode()
        )
        local, remote = (
            nixl.nixlXferDList(nixl.DRAM_SEG, [(address, size_bytes, 0) for address in addresses])
            for addresses in (targets, sources)
        )
        handle = self._agent.createXferReq(nixl.NIXL_READ, local, remote, name, "", [self._backend])
        status = self._agent.postXferReq(handle)
        while status == nixl.NIXL_IN_PROG:
            clock.sleep(PAUSE_SECONDS)
            status = self._agent.getXferStatus(handle)
        self._agent.releaseXferReq(handle)
        if status != nixl.NIXL_SUCCESS:
            raise SystemExit(f"NIXL: {status}")


class PlainMooncake:
    def __init__(self, address: int, size_bytes: int, *, serves: bool) -> None:
        del serves
        os.environ.setdefault("GLOG_minloglevel", "3")
        self._engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
        if self._engine.initialize(LOOPBACK, "P2PHANDSHAKE", "tcp", "") or self._engine.register_memory(
            address, size_bytes
        ):
            raise SystemExit("Mooncake does not start")
        self.described = f"{LOOPBACK}:{self._engine.get_rpc_port()}", b""

    def read(self, owner: tuple[str, bytes], targets: Sequence[int], sources: Sequence[int], size_bytes: int) -> None:
        sizes = [size_bytes] * len(targets)
        if self._engine.batch_transfer_sync_read(owner[0], list(targets), list(sources), sizes):
            raise SystemExit("Mooncake: a read failed")


PLAIN: Mapping[str, Callable[..., PlainEngine]] = {"nixl": PlainNixl, "mooncake_te": PlainMooncake}
