"""SeaweedFS itself: it starts, answers, checks signatures and ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from polling import until
from services.certificates import Certificates
from services.seaweedfs import SeaweedFS


def test_it_keeps_objects_and_checks_who_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SeaweedFS(tmp_path / "server", certificates=Certificates(tmp_path / "certificates")) as server:
        server.wait_ready()
        server.make_bucket("cache")
        assert server.call("PUT", "/cache/some/name", body=b"value").status == 200
        assert server.call("GET", "/cache/some/name").body == b"value"
        assert server.call("GET", "/cache/other").status == 404 == server.call("GET", "/elsewhere/name").status
        assert server.names("cache") == ["some/name"]
        monkeypatch.setattr(server, "credentials", server.credentials._replace(secret_key="another one"))
        assert server.call("GET", "/cache/some/name").status == 403
        monkeypatch.undo()
        server.kill()
        with server.restarted() as again:
            again.wait_ready()
            until(lambda: again.call("GET", "/cache/some/name").body == b"value", tell=again.log)
    assert not server.alive()
