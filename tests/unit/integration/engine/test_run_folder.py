"""The folder of servers that engines own."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest

from lmcache.errors import ResourceError
from lmcache.integration.engine import run_folder


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_folder, "run_folder_path", lambda: tmp_path / "run")
    return tmp_path / "run"


def test_it_is_there_for_an_engine_that_comes_while_the_last_one_leaves(path: Path) -> None:
    over = threading.Event()

    def remove() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                path.rmdir()

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for _ in range(2000):
            assert run_folder.run_folder() == path
    finally:
        over.set()
        remover.join()


@pytest.mark.parametrize("content", ["file", "link", "open to others"])
def test_what_is_not_this_users_alone_is_refused(path: Path, content: str) -> None:
    if content == "file":
        path.touch()
    elif content == "link":
        path.symlink_to(path.parent)
    else:
        path.mkdir(mode=0o755)
    with pytest.raises(ResourceError, match="is not a folder of this user alone"):
        run_folder.run_folder()
