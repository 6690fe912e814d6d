"""fio as the measure of a disk: the same transfers, in a folder on the same file system."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

MISSING = "fio is not installed (Debian: apt-get install fio); nothing is compared with it"


def present() -> bool:
    return shutil.which("fio") is not None


class Fio:
    """`count` transfers of `size_bytes`, by `threads` threads or an io_uring of that `depth`; on one file, or each on a
    file of its own. Without `direct` through the page cache, from which everything has been dropped before a read."""

    def __init__(
        self,
        folder: Path,
        count: int,
        size_bytes: int,
        engine: str,
        *,
        threads: int,
        depth: int,
        one_file: bool,
        direct: bool = True,
    ) -> None:
        self._folder = folder / "fio"
        self.file = self._folder / "device"
        self._folder.mkdir()
        self._one_file = one_file
        jobs = 1 if engine == "io_uring" else threads
        self._options = [
            f"--bs={size_bytes}",
            f"--ioengine={'io_uring' if engine == 'io_uring' else 'psync'}",
            f"--iodepth={depth if engine == 'io_uring' else 1}",
            f"--numjobs={jobs}",
            f"--size={count * size_bytes // jobs}",
            f"--direct={int(direct)}",
            f"--invalidate={int(not direct)}",
        ]
        if one_file:
            write_whole(self.file, count * size_bytes)
            self._options += [f"--filename={self.file}", f"--offset_increment={count * size_bytes // jobs}"]
        else:
            self._options += [
                f"--directory={self._folder}",
                f"--nrfiles={count // jobs}",
                f"--filesize={size_bytes}",
                f"--openfiles={max(1, depth // jobs)}",
                "--file_service_type=sequential",
                "--create_on_open=1",
                "--fallocate=none",
            ]

    def run(self, which: str) -> float:
        """ "read" or "write": bytes a second. Files of their own have to be written before they are read."""
        if which == "write" and not self._one_file:
            for path in self._folder.iterdir():
                path.unlink()
        command = ["fio", "--name=floor", f"--rw={which}", "--thread", "--group_reporting"]
        command += ["--output-format=json", "--mem=mmap", *self._options]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return float(json.loads(done.stdout)["jobs"][0][which]["bw_bytes"])


def write_whole(path: Path, size_bytes: int) -> None:
    """Every block has been written: reading a hole or an unwritten extent costs nothing and would prove nothing."""
    block = b"\0" * (1 << 20)
    with path.open("wb") as file:
        for start in range(0, size_bytes, len(block)):
            file.write(block[: min(len(block), size_bytes - start)])
        file.flush()
        os.fsync(file.fileno())
