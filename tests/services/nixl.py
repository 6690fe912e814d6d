"""NIXL, which is a package and no server."""

from __future__ import annotations

import importlib.util

from lmcache.testing.processes import LOOPBACK
from services import missing
from services.seaweedfs import ACCESS_KEY, REGION, SECRET_KEY, SeaweedFS


def need() -> None:
    """Ends the test where the package is not installed."""
    if importlib.util.find_spec("nixl") is None:
        missing("NIXL")


def s3_params(server: SeaweedFS, bucket: str) -> dict[str, str]:
    """What NIXL's plugin for object stores is given."""
    return {
        "endpoint_override": f"http://{LOOPBACK}:{server.port}",
        "scheme": "http",
        "region": REGION,
        "bucket": bucket,
        "access_key": ACCESS_KEY,
        "secret_key": SECRET_KEY,
    }
