"""The tutorial of docs/tutorial/first-hit.md: its commands as printed, a small model, a network of their own."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.harness import until
from lmcache.testing.processes import ManagedProcess, http_json
from services.network import Network, in_own_network, with_own_memory

pytestmark = pytest.mark.engine

TUTORIAL = (Path(__file__).parents[2] / "docs" / "tutorial" / "first-hit.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)
VLLM_PORT, HTTP_PORT = 8000, 8080
# What a CPU needs and the page, written for GPUs, does not say. In bfloat16 answers depend on the size of steps.
ON_CPU = "--dtype float32 --enforce-eager --max-model-len 4096 --max-num-seqs 4 --seed 0"


class Reader:
    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        for name, command in (
            ("lmcache", '-m lmcache.cli.main "$@"'),
            ("vllm", f'-m vllm.entrypoints.cli.main "$@" {ON_CPU}'),
            ("python3", '"$@"'),
        ):
            (programs / name).write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} {command}\n")
            (programs / name).chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin",
            "MODEL": str(model),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{max(0, min(2, os.cpu_count() or 1) - 1)}",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        }

    def _command(self, block: str) -> list[str]:
        return ["bash", "-euo", "pipefail", "-c", f"cd {shlex.quote(str(self.folder))}\n{block}"]

    def run(self, block: str, exit_codes: tuple[int, ...] = (0,)) -> str:
        done = subprocess.run(
            self._command(block), env=self.environment, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode in exit_codes, f"{block}{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, block: str, name: str) -> ManagedProcess:
        return ManagedProcess(self._command(f"exec {block}"), self.folder / f"{name}.log", self.environment)


def counted(output: str) -> float:
    """The value in the line of a metric."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in output.splitlines() if line.startswith("lmcache_mp_"))


def test_the_tutorial(tmp_path: Path, llama: Path) -> None:
    def test(network: Network) -> None:
        with_own_memory()
        reader = Reader(tmp_path, llama)
        doctor, server, ping, engine, prompt, ask, status, ask_again, compare, clear = BLOCKS
        reader.run(doctor, exit_codes=(0, 1))  # 1: this machine lacks something that is recommended
        running = reader.start(server, "server")
        with running:
            running.wait_until_ready(HTTP_PORT, "/readyz", 60.0)
            reader.run(ping)
            with reader.start(engine, "vllm") as vllm:
                vllm.wait_until_ready(VLLM_PORT, "/health", 600.0)
                reader.run(prompt)
                assert counted(reader.run(ask)) == 1792
                until(lambda: json.loads(reader.run(status))["l2"]["adapters"][0]["objects"] == 7)
                assert running.stop() == 0, running.log()
                with reader.start(server, "server-again") as again:
                    again.wait_until_ready(HTTP_PORT, "/readyz", 60.0)
                    until(lambda: http_json(HTTP_PORT, "GET", "/status")[1]["instances"])
                    loaded = until(lambda: counted(reader.run(ask_again)))  # 0 while the engine does not know of it
                    assert loaded == 1792
                    assert reader.run(compare).count("'") == 2, "one answer"
                    reader.run(clear)
                    assert json.loads(reader.run(status))["l2"]["adapters"][0]["objects"] == 0
                    assert again.stop() == 0, again.log()

    in_own_network(test)
