"""A service behind the server for each remote tier that can be had on this machine, and the adapter for it.

The services are those of the tests; `scripts/install_services.py` installs them. A tier is a line of TIERS.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from lmcache.testing.processes import LOOPBACK

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

MIB = 1 << 20
Specification = dict[str, Any]


class Tier(NamedTuple):
    """`serve`: of a folder and a number of objects of at most 4 MiB, runs the service and yields the adapter's JSON.
    `in_peer`: LMCache 0.5.6 takes the same JSON, and its server `peer_flags`."""

    serve: Callable[[Path, int], AbstractContextManager[Specification]]
    in_peer: bool = False
    peer_flags: tuple[str, ...] = ()


@contextmanager
def _files(folder: Path, objects: int) -> Iterator[Specification]:
    yield {"type": "fs", "base_path": str(folder / "l2")}


@contextmanager
def _valkey(folder: Path, objects: int) -> Iterator[Specification]:
    from services.redis import Valkey

    with Valkey(folder / "valkey") as service:
        service.wait_ready()
        yield {"type": "resp", "host": LOOPBACK, "port": service.port}


@contextmanager
def _s3(folder: Path, objects: int) -> Iterator[Specification]:
    """The bucket is named in the host: with the domain 0.0.1 that of 127.0.0.1 is 127."""
    from services.seaweedfs import ACCESS_KEY, REGION, SECRET_KEY, SeaweedFS

    with SeaweedFS(folder / "seaweedfs", domain="0.0.1") as service:
        service.wait_ready()
        service.make_bucket("127")
        yield {
            "type": "s3",
            "s3_endpoint": f"{LOOPBACK}:{service.port}",
            "s3_region": REGION,
            "disable_tls": True,
            "aws_access_key_id": ACCESS_KEY,
            "aws_secret_access_key": SECRET_KEY,
        }


@contextmanager
def _nixl_posix(folder: Path, objects: int) -> Iterator[Specification]:
    params = {"file_path": str(folder / "pool"), "use_direct_io": "false"}
    yield {"type": "nixl_store", "backend": "POSIX", "pool_size": objects, "backend_params": params}


@contextmanager
def _nixl_s3(folder: Path, objects: int) -> Iterator[Specification]:
    from services.nixl import s3_params
    from services.seaweedfs import SeaweedFS

    with SeaweedFS(folder / "seaweedfs") as service:
        service.wait_ready()
        service.make_bucket("cache")
        params = s3_params(service, "cache")
        yield {"type": "nixl_store", "backend": "OBJ", "pool_size": objects, "backend_params": params}


@contextmanager
def _nixl_azure(folder: Path, objects: int) -> Iterator[Specification]:
    from services.azurite import Azurite

    with Azurite(folder / "azurite") as service:
        service.wait_ready()
        service.make_container("cache")
        params = {"connection_string": service.connection_string, "container_name": "cache"}
        yield {"type": "nixl_store", "backend": "AZURE_BLOB", "pool_size": objects, "backend_params": params}


@contextmanager
def _mooncake(folder: Path, objects: int) -> Iterator[Specification]:
    """In the memory of another process."""
    from services.mooncake import Master, Peer, setup_keys

    with Master(folder) as master:
        master.wait_ready()
        with Peer(folder, master, objects * 4 * MIB) as peer:
            peer.wait_ready()
            yield {"type": "mooncake_store", **setup_keys(master, 0)}


TIERS = {
    "fs": Tier(_files, in_peer=True),
    "resp": Tier(_valkey, in_peer=True),
    "s3": Tier(_s3, in_peer=True),
    # Slots of the peer's pool are as large as L1 aligns objects, here a chunk; ours hold an object each.
    "nixl": Tier(_nixl_posix, in_peer=True, peer_flags=("--l1-align-bytes", str(2 * MIB))),
    "nixl-s3": Tier(_nixl_s3),
    "nixl-azure": Tier(_nixl_azure),
    "mooncake": Tier(_mooncake),
}
