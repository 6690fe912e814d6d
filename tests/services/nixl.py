"""NIXL, which is a package and no server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.l2.adapters import nixl_agent
from lmcache.testing.processes import LOOPBACK
from services import need_package
from services.seaweedfs import ACCESS_KEY, REGION, SECRET_KEY, SeaweedFS


def need() -> None:
    """Ends the test where the package is not installed."""
    need_package("nixl")


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


class _NotingAgent:
    """An agent of NIXL that notes what is registered with it: the kind, and how many descriptors."""

    def __init__(self, agent: Any, noted: list[tuple[Any, int]]) -> None:
        self._agent, self._noted = agent, noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def registerMem(self, descriptors: Any, backends: Any) -> Any:
        self._noted.append((descriptors.getType(), descriptors.descCount()))
        return self._agent.registerMem(descriptors, backends)


def note_registrations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """A list that grows by each call of `registerMem` that agents which are made from now on get."""
    noted: list[tuple[Any, int]] = []
    load = nixl_agent.load_bindings

    def noting(where: str) -> Any:
        bindings = vars(load(where))
        return SimpleNamespace(
            **{**bindings, "nixlAgent": lambda *settings: _NotingAgent(bindings["nixlAgent"](*settings), noted)}
        )

    monkeypatch.setattr(nixl_agent, "load_bindings", noting)
    return noted
