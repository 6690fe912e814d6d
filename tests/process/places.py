"""Where server after server runs: one name in /dev/shm, one folder, one pair of ports."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lmcache.testing.processes import CacheServer, free_port


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self.http_port = free_port(), free_port()
        self.name = f"lmcache-test-{os.getpid()}-{self.port}-place"
        self.servers = 0

    @property
    def file(self) -> Path:
        return Path("/dev/shm") / self.name

    def server(self, *extra: str, **options: Any) -> CacheServer:
        """One more server, which has just been started; its log is a file of its own."""
        self.servers += 1
        settings: dict[str, Any] = {"l1_size_gb": 0.0625, "port": self.port, "http_port": self.http_port, **options}
        log = f"server-{self.servers}.log"
        return CacheServer(self.folder, shm_name=self.name, extra=extra, log_name=log, **settings)

    def close(self) -> None:
        self.file.unlink(missing_ok=True)
