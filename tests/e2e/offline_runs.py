"""Runs of offline_script.py: an engine in a script, as its user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from e2e.harness import PACKAGE_PARENT

SCRIPT = Path(__file__).with_name("offline_script.py")
TOKENS, CHUNK_TOKENS = 1200, 256
ASKED = (TOKENS, 3, 8)
SCRIPT_SECONDS = 300.0
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "PYTHONPATH": str(PACKAGE_PARENT),
}


def command(model: Path, transfer: dict[str, Any], asked: tuple[int, int, int] = ASKED) -> list[str]:
    return [sys.executable, str(SCRIPT), str(model), json.dumps(transfer), *map(str, asked)]


def run_script(
    model: Path, transfer: dict[str, Any], asked: tuple[int, int, int] = ASKED, **environment: str
) -> tuple[dict[str, Any], str]:
    """Its results and its log; it has ended by itself, with exit code 0. `asked`: tokens of the prompt, how often it is
    answered, and with how many tokens."""
    ended = subprocess.run(
        command(model, transfer, asked),
        env={**os.environ, **SETTINGS, **environment},
        capture_output=True,
        text=True,
        timeout=SCRIPT_SECONDS,
        check=False,
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output[-3000:]
    return results_of(output), output


def results_of(output: str) -> dict[str, Any]:
    (line,) = [line for line in output.splitlines() if line.startswith("RESULTS ")]
    return dict(json.loads(line.removeprefix("RESULTS ")))
