"""Where a server is that engines start themselves: its processes, its files, and what uses it as engines do."""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import sys
from pathlib import Path

from lmcache.integration.engine.run_folder import run_folder
from lmcache.integration.engine.server_guardian import READY
from lmcache.testing.processes import free_port

SCRIPT = Path(__file__).with_name("owned_engine.py")


class OwnedPlace:
    """A place for a server, what is there, and engines that use it."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"tcp://127.0.0.1:{self.port}"
        self.shm = Path(f"/dev/shm/lmcache-{self.port}")
        self.engines: list[subprocess.Popen[str]] = []

    def engine(self, *options: str, keep: bool = False, wait_seconds: float = 30.0) -> subprocess.Popen[str]:
        command = [sys.executable, str(SCRIPT), self.url, "keep" if keep else "", str(wait_seconds)]
        command += ["--l1-size-gb", "0.0625", *options]
        pipe = subprocess.PIPE
        self.engines.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True))
        return self.engines[-1]

    def servers(self) -> list[int]:
        """Their process ids."""
        word, found = str(self.port).encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if b"server" in words and word in words:
                    found.append(int(folder.name))
        return found

    def server(self) -> int:
        (pid,) = self.servers()
        return pid

    def says_ready(self) -> bool:
        """To its guardian. It answers engines a moment earlier."""
        return any(READY in path.read_bytes() for path in run_folder().glob(f"*{self.port}-*.log"))

    def is_ending(self) -> bool:
        """Whether the guardian knows that no engine is left: none can join until its server has ended."""
        try:
            for path in run_folder().glob(f"*{self.port}-*.lock"):
                with path.open() as lock:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return False
        except (BlockingIOError, FileNotFoundError):
            pass
        return True

    def files(self) -> list[Path]:
        folder = run_folder()
        found = list(folder.glob(f"*{self.port}-*")) + [self.shm] * self.shm.exists()
        with contextlib.suppress(OSError):
            folder.rmdir()
        return found

    def is_clean(self) -> bool:
        return not self.servers() and not self.files()
