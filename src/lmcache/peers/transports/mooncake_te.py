"""One-sided reads by Mooncake's TransferEngine: RDMA where there is a device, else TCP.

Runs in a process of its own (`library_main`).
"""

from __future__ import annotations

import importlib
import os
import socket
import threading
from collections.abc import Sequence

from lmcache.core import limits
from lmcache.errors import ResourceError
from lmcache.l2.adapters.mooncake_client import INSTALL, RDMA_DEVICES, SYSTEM_LIBRARIES
from lmcache.peers.transports.known_servers import KnownServers
from lmcache.peers.transports.library import WHERE, LibrarySettings, RefusedRead, Region, refuse_late


def choose_family(host: str) -> None:
    """Before the library is loaded: it knows other servers by addresses of one family, by those of IPv6 if told so."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # a name that others may know
        return
    if {family for family, *_ in found} == {socket.AF_INET6}:
        os.environ["MC_USE_IPV6"] = "1"


class MooncakeLibrary:
    def __init__(self, settings: LibrarySettings, address: int) -> None:
        where = f"{WHERE} mooncake_te"
        choose_family(settings.host)
        try:
            module = importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise ResourceError(
                f'{where}: the package "mooncake-transfer-engine-non-cuda" cannot be loaded ({error}); install it with '
                f"{INSTALL} and, on Debian, `apt-get install {SYSTEM_LIBRARIES}`."
            ) from None
        protocol = "rdma" if os.path.isdir(RDMA_DEVICES) and os.listdir(RDMA_DEVICES) else "tcp"
        self._engine = module.TransferEngine()
        if self._engine.initialize(settings.host, "P2PHANDSHAKE", protocol, ""):
            raise ResourceError(f"{where}: Mooncake cannot listen at {settings.host} over {protocol}.")
        if self._engine.register_memory(address, settings.size_bytes):
            raise ResourceError(f"{where}: Mooncake cannot register L1 over {protocol}.")
        name = f"{settings.host}:{self._engine.get_rpc_port()}"
        self._region = Region(name, b"", address, settings.size_bytes)
        # Reads from one server are faster one after the other. The library itself has no call that forgets a server.
        self._turns: KnownServers[str, threading.Lock] = KnownServers(
            lambda name: threading.Lock(), lambda turn: None, limits.MAX_PEERS
        )

    def region(self) -> Region:
        return self._region

    def read(
        self, region: Region, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], deadline: float
    ) -> None:
        if region.metadata:
            raise RefusedRead("the other server describes its memory as Mooncake does not")
        with self._turns.reading(region.name) as turn, turn:
            refuse_late(deadline)
            failed = self._engine.batch_transfer_sync_read(region.name, list(targets), list(sources), list(sizes))
        if failed:
            raise OSError(f"Mooncake reports a read from {region.name} that failed")
