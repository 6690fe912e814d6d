"""The base folder of a file adapter goes while a server runs: nothing is written in its place, and stores go on when it
is back."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache.core.outcome import StoreOutcome
from unit.l2.support import OneServer, run


@pytest.mark.parametrize("relative_tmp_dir", ["", "tmp", "tmp/deep"])
def test_a_base_that_was_unmounted_is_not_made_again(tmp_path: Path, relative_tmp_dir: str) -> None:
    base, aside = tmp_path / "mounted" / "cache", tmp_path / "aside"
    spec = {"type": "fs_native", "base_path": str(base), "io_engine": "posix", "relative_tmp_dir": relative_tmp_dir}

    async def test() -> None:
        async with OneServer(spec) as server:
            assert await server.store(1) == [StoreOutcome.STORED]
            base.rename(aside)
            assert await server.store(1, seed=1) == [StoreOutcome.FAILED]
            assert list(base.parent.iterdir()) == []
            aside.rename(base)
            assert await server.store(1, seed=1) == [StoreOutcome.STORED]

    run(test)


@pytest.mark.parametrize("relative_tmp_dir", ["tmp", "tmp/deep"])
def test_a_folder_of_temporary_files_that_was_removed_is_made_again(tmp_path: Path, relative_tmp_dir: str) -> None:
    spec = {"type": "fs_native", "base_path": str(tmp_path), "io_engine": "posix", "relative_tmp_dir": relative_tmp_dir}

    async def test() -> None:
        async with OneServer(spec) as server:
            folder = tmp_path / relative_tmp_dir
            while folder != tmp_path:
                folder.rmdir()
                folder = folder.parent
            assert await server.store(1) == [StoreOutcome.STORED]

    run(test)
