"""vllm-router: sends requests to the engine that has their KV, or to one for the prompt and another for the answer.

with VllmRouter(tmp_path, "--policy", "round_robin", "--worker-urls", url) as router:
    router.wait_ready()
"""

from __future__ import annotations

import shutil
from pathlib import Path

from lmcache.testing.processes import LOOPBACK, ManagedProcess, free_port
from services import FOLDER, program

READY_SECONDS = 120.0
_MODULES = FOLDER / "python"


def command() -> list[str]:
    """What begins its command line; ends the test where it is not installed."""
    installed = _MODULES / "bin" / "vllm-router"
    if not installed.exists() and (of_system := shutil.which("vllm-router")):
        return [of_system]
    return ["/usr/bin/env", f"PYTHONPATH={_MODULES}", str(program(installed, "vllm-router"))]


class VllmRouter(ManagedProcess):
    name = "vllm-router"

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        places = ["--host", LOOPBACK, "--port", str(self.port), "--prometheus-port", str(free_port())]
        super().__init__([*command(), *places, *options], folder / "router.log")

    def wait_ready(self) -> float:
        """Until it has found every engine ready."""
        return self.wait_until_ready(self.port, "/health", READY_SECONDS)
