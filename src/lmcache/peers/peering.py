"""What a server has of its peers: the listener that they load from, and the adapter that loads from them."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable
from typing import Any

from lmcache.clock import Clock
from lmcache.config.spec import ServerConfig
from lmcache.core.address import host_and_port, is_loopback
from lmcache.core.chunking import ChunkHasher
from lmcache.l1.store import L1Store
from lmcache.l2.adapter_types import ConfiguredAdapter
from lmcache.peers.adapter import PeersAdapter
from lmcache.peers.config import PeersConfig, advertised, listening_at, peers_config
from lmcache.peers.handshake import Introducer
from lmcache.peers.identity import Identity
from lmcache.peers.listener import PeerListener
from lmcache.peers.transports.library import LibrarySettings
from lmcache.peers.transports.library_process import LibraryProcess
from lmcache.telemetry.metrics import P2PMetrics
from lmcache.transport.listening import listen

log = logging.getLogger("lmcache.peers")


class Peering:
    def __init__(
        self,
        config: ServerConfig,
        l1: L1Store,
        hasher: ChunkHasher,
        server_epoch: bytes,
        *,
        metrics: P2PMetrics,
        clock: Clock,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        """For a server with --p2p-advertise-url. ResourceError when it cannot listen."""
        adapter_config = peers_config(config)
        identity = Identity(
            server_epoch,
            advertised(config),
            hasher.chunk_tokens,
            hasher.algorithm,
            hasher.sample(),
            shm_path=l1.memory.path,
            shm_bytes=l1.memory.size_bytes,
            transfer_engine=adapter_config.transfer_engine,
        )
        introducer = Introducer(identity, config.p2p_token_file, random_bytes)
        reads, serves = (_library(adapter_config, identity, serves=serves) for serves in (False, True))
        self._peers = PeersAdapter(adapter_config, introducer, metrics, clock, reads, l1.memory)
        self.adapter = ConfiguredAdapter(adapter_config, self._peers)
        self.address = identity.address
        listening: socket.socket = listen(*listening_at(config), "--p2p-listen-url or --p2p-advertise-url")
        self.listener = PeerListener(listening, introducer, l1, metrics, clock, serves)

    def start(self) -> None:
        """After the storage loop has started. ResourceError where the transfer engine cannot be used."""
        self.listener.start()
        self._peers.wait_ready()
        log.info("Peers are served at %s", self.listener.address)

    def set_members(self, addresses: Iterable[str]) -> None:
        """As `PeersAdapter.set_members`, after the storage loop has started."""
        self._peers.set_members(addresses)

    def stop(self) -> bool:
        """The listener; the adapter ends with the storage loop. As `PeerListener.stop`."""
        return self.listener.stop()

    def status(self) -> dict[str, Any]:
        return self.listener.status()


def _library(config: PeersConfig, identity: Identity, *, serves: bool) -> LibraryProcess | None:
    if not config.transfer_engine:
        return None
    host, _ = host_and_port("--p2p-advertise-url", identity.address)
    settings = LibrarySettings(
        config.transfer_engine, identity.shm_path, identity.shm_bytes, identity.epoch, host, serves
    )
    return LibraryProcess(settings, this_host_alone=is_loopback(host))
