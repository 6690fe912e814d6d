"""The keys of `mooncake_store`: few are ours, every other one goes to the setup of Mooncake's client as it is."""

from __future__ import annotations

import os
import re
from typing import Annotated, Literal

from msgspec import Meta

from lmcache.config.struct_settings import keys_of
from lmcache.config.values import suggestion
from lmcache.l2.adapter_config import INTERNAL, AdapterConfig, NonEmpty, Threads
from lmcache.l2.adapters.remote_names import DEFAULT_PREFIX, Prefix

P2P_HANDSHAKE = "P2PHANDSHAKE"  # a metadata_server that is none: clients ask each other

# What the setup of Mooncake 0.3.13 knows beside the keys that are declared here.
_OTHER_SETUP_KEYS = (
    "ipc_socket_path",
    "enable_ssd_offload",
    "ssd_offload_path",
    "tenant_id",
    "enable_client_http_server",
    "client_http_port",
)
# What older versions take, by position, with the values that they have by themselves.
_POSITIONAL_SETUP = {
    "local_hostname": "",
    "metadata_server": "",
    "global_segment_size": "16777216",
    "local_buffer_size": "16777216",
    "protocol": "tcp",
    "rdma_devices": "",
    "master_server_addr": "",
}
_ADDRESS = re.compile(r"(?:https?://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})(?:/.*)?")

Bytes = Annotated[
    int | str | None,
    Meta(extra={"expected": 'bytes, a whole number or a string such as "3221225472"', "default": "Mooncake's own"}),
]


class MooncakeConfig(AdapterConfig, frozen=True, kw_only=True):
    """Objects in the memory of the machines that a Mooncake Store joins, moved by Mooncake's client. Every key that is
    not listed here goes to the setup of that client."""

    forwards_other_keys = True

    local_hostname: Annotated[
        str, NonEmpty, Meta(description="name or address under which other machines reach this one")
    ]
    metadata_server: Annotated[
        str, NonEmpty, Meta(description=f"URL of Mooncake's metadata server, or {P2P_HANDSHAKE} to do without")
    ]
    master_server_addr: Annotated[str, NonEmpty, Meta(description="host:port of mooncake_master")]
    protocol: Annotated[Literal["tcp", "rdma"], Meta(description="how memory of other machines is reached")] = "tcp"
    rdma_devices: Annotated[
        str, Meta(description="comma-separated names of RDMA devices; empty: those that are found")
    ] = ""
    global_segment_size: Annotated[Bytes, Meta(description="memory that this server gives to the store")] = None
    local_buffer_size: Annotated[Bytes, Meta(description="memory of the client for transfers of its own")] = None
    num_workers: Annotated[
        Threads,
        Meta(
            description="threads that move objects, a batch each; a thread that moves something keeps a processor busy",
            extra={"default": "half of the processors, from 1 to 4"},
        ),
    ] = max(1, min(4, len(os.sched_getaffinity(0)) // 2))
    prefix: Prefix = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        if strange := [name for name, value in self.forwarded.items() if not isinstance(value, (str, int, float))]:
            raise ValueError(f'"{strange[0]}" goes to Mooncake\'s setup and must be a string, a number, true or false.')
        super().__post_init__()

    @property
    def is_shared(self) -> bool:
        return True

    @property
    def setup_keys(self) -> dict[str, str]:
        """What Mooncake's setup is given: strings, as it takes nothing else everywhere."""
        own = {
            "local_hostname": self.local_hostname,
            "metadata_server": self.metadata_server,
            "master_server_addr": self.master_server_addr,
            "protocol": self.protocol,
            "rdma_devices": self.rdma_devices,
            "global_segment_size": self.global_segment_size,
            "local_buffer_size": self.local_buffer_size,
        }
        return {name: _text(value) for name, value in {**own, **self.forwarded}.items() if value not in (None, "")}

    def positional_setup(self) -> tuple[str | int, ...]:
        """What the setup of a Mooncake without keys is given. ValueError where that cannot say what they say."""
        keys = {**_POSITIONAL_SETUP, **self.setup_keys}
        if unknown := [name for name in keys if name not in _POSITIONAL_SETUP]:
            raise ValueError(f'it takes no "{unknown[0]}"')
        for name in ("global_segment_size", "local_buffer_size"):
            if not (keys[name].isascii() and keys[name].isdigit()):
                raise ValueError(f'it takes "{name}" as a number of bytes, not as {keys[name]!r}')
        return tuple(int(keys[name]) if name.endswith("_size") else keys[name] for name in _POSITIONAL_SETUP)

    @property
    def services(self) -> dict[str, tuple[str, int]]:
        """Host and port of what the client talks to at its start, by the key that names it."""
        addresses = {"master_server_addr": self.master_server_addr, "metadata_server": self.metadata_server}
        found = {name: _ADDRESS.fullmatch(address) for name, address in addresses.items()}
        return {name: (match[1].strip("[]"), int(match[2])) for name, match in found.items() if match}

    def idle_keys(self) -> dict[str, str]:
        return {} if self.protocol == "rdma" else {"rdma_devices": 'only "protocol" "rdma" uses RDMA devices'}

    def notes(self) -> list[str]:
        known = [key.name for key in keys_of(type(self), INTERNAL)]
        return [
            *super().notes(),
            f"{self.where}: Mooncake's client listens on all addresses of this machine and asks nobody who they are; "
            "keep its ports behind a firewall.",
            *(
                f'{self.where}: "{name}" goes to Mooncake\'s setup, which is not known to have such a key'
                f"{suggestion(name, (*known, *_OTHER_SETUP_KEYS))}."
                for name in self.forwarded
                if name not in _OTHER_SETUP_KEYS
            ),
        ]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
