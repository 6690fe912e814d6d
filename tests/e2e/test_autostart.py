"""A script with an engine and no server beside it: hits, the right tokens, exit code 0, and nothing left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import PACKAGE_PARENT, until
from lmcache.integration.engine.run_folder import run_folder
from lmcache.testing.processes import free_port

SCRIPT = Path(__file__).with_name("offline_script.py")
TOKENS, CHUNK_TOKENS = 1200, 256


def run_script(model: Path, transfer: dict[str, Any], **environment: str) -> tuple[dict[str, Any], str]:
    """Its results and its log; it has ended by itself, with exit code 0."""
    settings = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": str(PACKAGE_PARENT),
        **environment,
    }
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), str(model), json.dumps(transfer), str(TOKENS)],
        env=settings,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output[-3000:]
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("RESULTS ")]
    return json.loads(line.removeprefix("RESULTS ")), output


def check_answers(results: dict[str, Any], log: str) -> None:
    cold, *warm = results["answers"]
    assert cold[1] == 0
    for tokens, cached, _ in warm:
        assert tokens == cold[0]
        assert cached == TOKENS // CHUNK_TOKENS * CHUNK_TOKENS, log


@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_script_with_autostart_hits_and_leaves_nothing(llama: Path, in_process: bool) -> None:
    port = free_port()
    extra = {
        "lmcache.mp.port": port,
        "lmcache.mp.autostart": True,
        "lmcache.mp.autostart.server_args": "--l1-size-gb 0.25 --http-port 0 --prometheus-port 0",
        "lmcache.mp.load_or_recompute": False,
    }
    results, log = run_script(
        llama,
        {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra},
        VLLM_ENABLE_V1_MULTIPROCESSING="0" if in_process else "1",
    )
    check_answers(results, log)
    assert "unavailable" not in log
    until(lambda: not Path(f"/dev/shm/lmcache-{port}").exists(), 20)
    until(lambda: not list(run_folder().glob(f"*{port}-*")), 20)


DYNAMIC = {
    "kv_connector": "LMCacheConnectorV1Dynamic",
    "kv_connector_module_path": "lmcache.integration.vllm.lmcache_connector_v1",
}


def private_files() -> set[Path]:
    """Of servers that only one engine reaches."""
    return {*run_folder().glob("*.sock"), *Path("/dev/shm").glob("lmcache-dev-shm-*")}


@pytest.mark.parametrize(
    ("connector", "in_process"),
    [
        pytest.param(DYNAMIC, True, marks=pytest.mark.slow),
        pytest.param(DYNAMIC, False, marks=pytest.mark.slow),
        ({"kv_connector": "LMCacheConnectorV1"}, False),
    ],
    ids=["dynamic-in-process", "dynamic", "plain"],
)
def test_a_script_with_the_configuration_inside_the_engine_hits_and_leaves_nothing(
    llama: Path, tmp_path: Path, connector: dict[str, str], in_process: bool
) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 0.25\nenable_p2p: false\n")
    before = private_files()
    results, log = run_script(
        llama,
        {**connector, "kv_connector_extra_config": {"lmcache.mp.load_or_recompute": False}},
        LMCACHE_CONFIG_FILE=str(file),
        VLLM_ENABLE_V1_MULTIPROCESSING="0" if in_process else "1",
    )
    check_answers(results, log)
    assert "unavailable" not in log
    until(lambda: private_files() <= before, 20)
