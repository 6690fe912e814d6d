"""vllm-router: sends requests to the engine that has their KV, or to one for the prompt and another for the answer.

with VllmRouter(tmp_path, "--policy", "round_robin", "--worker-urls", url) as router:
    router.wait_ready()
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from lmcache.testing.processes import LOOPBACK, ManagedProcess, free_port
from services import FOLDER, missing

READY_SECONDS = 120.0
_MODULES = FOLDER / "python"
_MAIN = "from vllm_router.launch_router import main; main()"


def command() -> list[str]:
    """What begins its command line; ends the test where it is not installed."""
    if (_MODULES / "vllm_router").is_dir():  # by its module: of several packages in one folder pip puts one's programs
        return ["/usr/bin/env", f"PYTHONPATH={_MODULES}", sys.executable, "-c", _MAIN]
    of_system = shutil.which("vllm-router")
    if of_system is None:
        missing("vllm-router")
    return [of_system]


class VllmRouter(ManagedProcess):
    name = "vllm-router"

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        places = ["--host", LOOPBACK, "--port", str(self.port), "--prometheus-port", str(free_port())]
        super().__init__([*command(), *places, *options], folder / "router.log")

    def wait_ready(self) -> float:
        """Until it has found every engine ready."""
        return self.wait_until_ready(self.port, "/health", READY_SECONDS)
