"""One-sided reads by NIXL's UCX plugin: RDMA where there is a device, else shared memory or TCP.

Runs in a process of its own (`library_main`). What is chosen by UCX's variables (UCX_TLS, UCX_NET_DEVICES) is in force.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from lmcache.core import limits
from lmcache.environment import SYSTEM
from lmcache.errors import ResourceError
from lmcache.l2.adapters import nixl_agent
from lmcache.peers.transports.known_servers import KnownServers
from lmcache.peers.transports.library import WHERE, LibrarySettings, RefusedRead, Region, refuse_late

_BACKEND = "UCX"


class NixlLibrary:
    def __init__(self, settings: LibrarySettings, address: int) -> None:
        where = f"{WHERE} nixl"
        self._nixl = nixl = nixl_agent.load_bindings(where)
        self._faults = nixl_agent.faults_of(nixl)
        self._address, self._size_bytes = address, settings.size_bytes
        # Names of other agents, by their metadata.
        self._agents: KnownServers[bytes, str] = KnownServers(self._load, self._forget, limits.MAX_PEERS)
        # Others are served by a thread of the agent, while nothing is called here; reads are polled by who waits.
        self._name = f"{settings.server_epoch.hex()}-{SYSTEM.random_bytes(8).hex()}"
        config = nixl.nixlAgentConfig(settings.serves, False, 0, nixl.NIXL_THREAD_SYNC_STRICT)
        try:
            self._agent = nixl.nixlAgent(self._name, config)
            self._backend = self._agent.createBackend(_BACKEND, {})
            memory = nixl.nixlRegDList(nixl.DRAM_SEG, [(address, settings.size_bytes, 0, "")])
            self._agent.registerMem(memory, [self._backend])
        except self._faults as error:
            raise ResourceError(f"{where}: NIXL cannot register L1 with its plugin {_BACKEND} ({error}).") from None

    def region(self) -> Region:
        return Region(self._name, self._agent.getLocalMD(), self._address, self._size_bytes)

    def read(
        self, region: Region, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], deadline: float
    ) -> None:
        refuse_late(deadline)
        try:
            with self._agents.reading(region.metadata) as name:
                self._transfer(name, self._descriptors(targets, sizes), self._descriptors(sources, sizes))
        except self._faults as error:
            raise RefusedRead(f"NIXL refuses the read ({error})") from None

    def _transfer(self, name: str, targets: Any, sources: Any) -> None:
        """OSError as `read`; whatever else NIXL raises: it was not begun."""
        nixl = self._nixl
        handle = self._agent.createXferReq(nixl.NIXL_READ, targets, sources, name, "", [self._backend])
        try:
            status = self._agent.postXferReq(handle)
            # The server ends this process when it takes too long.
            status = nixl_agent.end_of_transfer(nixl, self._agent, handle, status, SYSTEM.clock)
            if status != nixl.NIXL_SUCCESS:
                raise OSError(f"NIXL reports a read that ended with {status}")
            self._agent.releaseXferReq(handle)
        except self._faults as error:
            raise OSError(f"NIXL reports a read that failed ({error})") from None

    def _load(self, metadata: bytes) -> str:
        loaded: Any = self._agent.loadRemoteMD(metadata)
        return loaded.decode() if isinstance(loaded, bytes) else str(loaded)

    def _forget(self, name: str) -> None:
        with contextlib.suppress(*self._faults):
            self._agent.invalidateRemoteMD(name)

    def _descriptors(self, addresses: Sequence[int], sizes: Sequence[int]) -> Any:
        ranges = [(address, size, 0) for address, size in zip(addresses, sizes, strict=True)]
        return self._nixl.nixlXferDList(self._nixl.DRAM_SEG, ranges)
