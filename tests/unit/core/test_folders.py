"""What is said about a folder without touching it is what the attempt would say."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lmcache.core.folders import refuse_unwritable


def number_of(path: Path) -> int | None:
    try:
        refuse_unwritable(str(path))
    except OSError as error:
        assert error.strerror == os.strerror(error.errno or 0)
        return error.errno
    return 0


def attempted(path: Path) -> int | None:
    try:
        os.makedirs(path, exist_ok=True)
        os.listdir(path)
        (path / "file").touch()
    except OSError as error:
        return error.errno
    return 0


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("folder", 0),
        ("folder/new", 0),
        ("new/deep/er", 0),
        ("file", errno.EEXIST),
        ("file/in", errno.ENOTDIR),
        ("file/in/deep", errno.ENOTDIR),
        ("dangling", errno.EEXIST),
    ],
)
def test_folders_and_what_is_none(tmp_path: Path, name: str, number: int) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    assert number_of(tmp_path / name) == number
    assert sorted(tmp_path.rglob("*")) == before
    assert attempted(tmp_path / name) == number


def test_a_file_system_that_is_mounted_read_only() -> None:
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    read_only = [path for _, path, _, options, *_ in mounts if "ro" in options.split(",") and os.path.isdir(path)]
    if not read_only:
        pytest.skip("no file system is mounted read-only")
    assert number_of(Path(read_only[0], "new")) == errno.EROFS
