"""Mooncake's master, and machines that give memory to its store.

with Master(tmp_path) as master, Peer(tmp_path, master) as peer:
    master.wait_ready()
    peer.wait_ready()
"""

from __future__ import annotations

import importlib.util
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmcache.testing.processes import LOOPBACK, ManagedProcess, free_port
from polling import until
from services import missing

READY_SECONDS = 30.0
SEGMENT_BYTES = 64 << 20
BUFFER_BYTES = 16 << 20

PEER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
keys = dict(argument.split("=", 1) for argument in sys.argv[1:])
assert store.setup(keys) == 0
print("ready", flush=True)
time.sleep(3600)
"""


def need() -> None:
    """Ends the test where the package is not installed."""
    if importlib.util.find_spec("mooncake") is None:
        missing("Mooncake")


class Master(ManagedProcess):
    """It keeps the names of objects in its memory: after a restart the store is empty."""

    name = "Mooncake's master"

    def __init__(self, folder: Path, port: int = 0, *, metadata_port: int = 0, **others: object) -> None:
        """`metadata_port`: it is the metadata server, too, which otherwise is none. `others` are options of the
        program."""
        need()
        self.folder = folder
        self.port = port or free_port()
        self.metadata_port = metadata_port
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None and spec.submodule_search_locations
        program = Path(spec.submodule_search_locations[0]) / "mooncake_master"
        options = {
            "rpc_address": LOOPBACK,
            "rpc_port": self.port,
            "metrics_host": LOOPBACK,
            "metrics_port": free_port(),
            "client_ttl": 3,
            **others,
        }
        if metadata_port:
            options |= {
                "enable_http_metadata_server": "true",
                "http_metadata_server_host": LOOPBACK,
                "http_metadata_server_port": metadata_port,
            }
        super().__init__(
            [str(program), *(f"--{name}={value}" for name, value in options.items())], folder / "master.log"
        )

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    @property
    def metadata_server(self) -> str:
        return f"http://{LOOPBACK}:{self.metadata_port}/metadata" if self.metadata_port else "P2PHANDSHAKE"

    def wait_ready(self, timeout_seconds: float = READY_SECONDS) -> None:
        def answers() -> bool:
            self.check_alive()
            with suppress(OSError):
                for port in filter(None, (self.port, self.metadata_port)):
                    socket.create_connection((LOOPBACK, port), 1.0).close()
                return True
            return False

        until(answers, timeout_seconds, tell=self.log)

    def restarted(self) -> Master:
        """Another one at the same address, after this one has ended."""
        assert not self.alive()
        return Master(self.folder, self.port, metadata_port=self.metadata_port)


def setup_keys(master: Master, segment_bytes: int = SEGMENT_BYTES) -> dict[str, Any]:
    """Of a client."""
    return {
        "local_hostname": LOOPBACK,
        "metadata_server": master.metadata_server,
        "master_server_addr": master.address,
        "protocol": "tcp",
        "global_segment_size": str(segment_bytes),
        "local_buffer_size": str(BUFFER_BYTES),
    }


class Peer(ManagedProcess):
    """A process whose memory the store uses."""

    name = "a peer"

    def __init__(self, folder: Path, master: Master, segment_bytes: int = SEGMENT_BYTES) -> None:
        need()
        keys = [f"{name}={value}" for name, value in setup_keys(master, segment_bytes).items()]
        super().__init__([sys.executable, "-c", PEER, *keys], folder / "peer.log")

    def wait_ready(self, timeout_seconds: float = READY_SECONDS) -> None:
        def is_ready() -> bool:
            self.check_alive()
            return "ready" in self.log()

        until(is_ready, timeout_seconds, tell=self.log)
