"""A vLLM that lacks something without which KV cannot be restored exactly: one sentence, uncached, the same answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.harness import PACKAGE_PARENT
from e2e.offline_runs import run_script
from lmcache.testing.processes import CacheServer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

DEMANDS_MORE = """
from lmcache.integration.vllm import versions
versions.HOOKS = (*versions.HOOKS, "teleport_kv")  # which no vLLM has
"""


DYNAMIC = "lmcache.integration.vllm.lmcache_connector_v1"


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize("name", ["LMCacheMPConnector", "LMCacheConnectorV1Dynamic", "LMCacheConnectorV1"])
def test_it_answers_uncached_and_says_why_once(
    llama: Path, computed: list[list[int]], tmp_path: Path, name: str, in_process: bool
) -> None:
    (tmp_path / "sitecustomize.py").write_text(DEMANDS_MORE)  # of every process of the engine
    with CacheServer(tmp_path, l1_size_gb=0.25) as server:
        server.wait_ready()
        results, log = run_script(
            llama,
            {
                "kv_connector": name,
                "kv_connector_extra_config": {"lmcache.mp.port": server.port},
                **({"kv_connector_module_path": DYNAMIC} if name == "LMCacheConnectorV1Dynamic" else {}),
            },
            PYTHONPATH=f"{tmp_path}:{PACKAGE_PARENT}",
            VLLM_ENABLE_V1_MULTIPROCESSING="0" if in_process else "1",
        )
        status = server.status()
    assert [answer[:2] for answer in results["answers"]] == [[tokens, 0] for tokens in computed]
    (said,) = [line for line in log.splitlines() if "This engine runs uncached" in line]
    assert " lacks teleport_kv, without which KV cannot be restored exactly; use a version of vLLM that" in said
    assert "Traceback" not in log
    assert (status["instances"], status["l1"]["objects"]) == ([], 0)
