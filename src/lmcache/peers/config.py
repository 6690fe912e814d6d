"""What the options of a server say about its peers."""

from __future__ import annotations

from lmcache.config.spec import ServerConfig
from lmcache.core.address import host_and_port, host_port
from lmcache.l2.adapter_config import AdapterConfig
from lmcache.peers.transports.library import ENGINES


class PeersConfig(AdapterConfig, frozen=True, kw_only=True):
    """Configures the adapter over all peers, which stands behind those of --l2-adapter. `timeout_seconds` is the
    deadline of loads."""

    members: tuple[str, ...] = ()
    lookup_timeout_seconds: float = 30.0
    heartbeat_seconds: float = 0.0  # to a coordinator, whose answers name members
    maps_memory: bool = True
    transfer_engine: str = ""  # that reads from peers that have it too
    this_host_alone: bool = False  # without a token: whoever answers elsewhere could make frames up

    @property
    def name(self) -> str:
        return "p2p"

    @property
    def where(self) -> str:
        return "--p2p-advertise-url"


def peers_config(config: ServerConfig) -> PeersConfig:
    """Returns what a server with --p2p-advertise-url configures."""
    return PeersConfig(
        index=len(config.l2_adapter),
        type="p2p",
        timeout_seconds=config.p2p_load_timeout,
        lookup_timeout_seconds=config.p2p_lookup_timeout,
        members=tuple(config.p2p_addresses),
        heartbeat_seconds=config.coordinator_heartbeat_interval,
        maps_memory=config.p2p_transfer_engine == "auto",
        transfer_engine=config.p2p_transfer_engine if config.p2p_transfer_engine in ENGINES else "",
        this_host_alone=not config.p2p_token_file and not config.p2p_without_token,
    )


def advertised(config: ServerConfig) -> str:
    """HOST:PORT that others connect to."""
    return host_port(*host_and_port("--p2p-advertise-url", config.p2p_advertise_url))


def listening_at(config: ServerConfig) -> tuple[str, int]:
    url = config.p2p_listen_url or config.p2p_advertise_url
    return host_and_port("--p2p-listen-url" if config.p2p_listen_url else "--p2p-advertise-url", url)
