"""Azurite itself: it starts, answers and ends."""

from __future__ import annotations

from pathlib import Path

from services.azurite import Azurite


def test_a_container_is_made_and_stays(tmp_path: Path) -> None:
    with Azurite(tmp_path / "azurite") as server:
        server.wait_ready()
        server.make_container("cache")
        server.stop()
    with server.restart() as again:
        again.wait_ready()
        assert again.call("PUT", "/cache?restype=container") == 409
