"""Weights that are replaced under a running engine: KV that was computed with others is never served."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache.testing.processes import CacheServer
from lmcache.testing.tiny_models import make_llama, sample_tokens
from support.tiny_shapes import make_lora

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT_TOKENS = 1100
CHUNKED_TOKENS = 1024
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}
LOCAL: list[Any] = ["reset", {}]
WITH_CONNECTOR: list[Any] = ["reset", {"reset_connector": True}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheServer]:
    with CacheServer(tmp_path_factory.mktemp("server"), l1_size_gb=0.1) as server:
        server.wait_ready()
        yield server


def run_engine(
    model: Path, server: CacheServer, calls: list[list[Any]], *, ranks: int = 1, load_format: str = "auto", **more: Any
) -> list[Any]:
    """What each call gave. `more`: options of the engine."""
    options = {"tensor_parallel_size": ranks, "load_format": load_format, **more}
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(rank % 2) for rank in range(ranks)) if ranks > 1 else "0-1"}
    command = [sys.executable, str(Path(__file__).with_name("in_process_engine.py")), str(model), str(server.port)]
    done = subprocess.run(
        [*command, json.dumps(calls), json.dumps(options)],
        env={**os.environ, **ENVIRONMENT, **binding},
        capture_output=True,
        text=True,
        timeout=300,
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert results, done.stdout[-2000:] + done.stderr[-3000:]
    return list(json.loads(results[0].removeprefix("RESULTS ")))


@pytest.mark.parametrize(
    ("ranks", "connector"), [(1, "LMCacheMPConnector"), (2, "LMCacheMPConnector"), (1, "LMCacheConnectorV1")]
)
def test_kv_of_previous_weights_is_neither_served_nor_found_under_the_new_name(
    llama: Path, tmp_path_factory: pytest.TempPathFactory, server: CacheServer, ranks: int, connector: str
) -> None:
    other = make_llama(tmp_path_factory.mktemp("other-weights") / "llama", seed=1)
    seed = 5 if connector == "LMCacheMPConnector" else 6  # the server knows none of its prompt
    ask = ["ask", sample_tokens(PROMPT_TOKENS, seed=seed), 8]
    reload = ["rpc", "reload_weights", {"weights_path": str(other)}]
    calls = [ask, LOCAL, ask, reload, WITH_CONNECTOR, ask, LOCAL, ask, WITH_CONNECTOR, ask]
    cold, emptied, warm, _, reset, new, emptied_again, new_warm, reset_again, new_again = run_engine(
        llama, server, calls, ranks=ranks, kv_connector=connector
    )
    assert (emptied, reset, emptied_again, reset_again) == (True, True, True, True)
    assert cold[1] == 0
    assert warm == [cold[0], CHUNKED_TOKENS]
    assert new[0] != cold[0]
    assert new[1] == 0
    assert new_warm == [new[0], CHUNKED_TOKENS]
    assert new_again == [new[0], 0]
    # Engines that start with the one or the other weights find what such an engine stored, or nothing.
    assert run_engine(llama, server, [ask], ranks=ranks, kv_connector=connector) == [[cold[0], CHUNKED_TOKENS]]
    assert run_engine(other, server, [ask], ranks=ranks, kv_connector=connector) == [[new[0], 0]]


def test_an_adapter_that_is_loaded_in_place_is_served_its_own_kv_alone(
    llama: Path, tmp_path_factory: pytest.TempPathFactory, server: CacheServer
) -> None:
    """Its files change under a running engine, which reads them again: first to other weights, then back."""
    folder = tmp_path_factory.mktemp("adapters")
    before, after = (str(make_lora(folder / name, llama, seed=seed)) for seed, name in enumerate(("before", "after")))
    trained = str(shutil.copytree(before, folder / "trained"))
    lora = {"lora_name": "trained", "lora_int_id": 1, "lora_path": trained, "load_inplace": True}
    ask = ["ask", sample_tokens(PROMPT_TOKENS, seed=80), 8, lora]
    base = ["ask", ask[1], 8]
    calls = [ask, LOCAL, ask, ["copy", after, trained], LOCAL, ask, LOCAL, ask, ["copy", before, trained], LOCAL, ask]
    answers = run_engine(llama, server, [*calls, LOCAL, base], enable_lora=True, max_lora_rank=8)
    cold, warm, new, new_warm, back, plain = (answer for answer in answers if isinstance(answer, list))
    assert cold[1] == 0 and warm == [cold[0], CHUNKED_TOKENS]
    assert new[0] != cold[0] and new[1] == 0
    assert new_warm == [new[0], CHUNKED_TOKENS]
    assert back == [cold[0], CHUNKED_TOKENS]
    assert plain[0] not in (cold[0], new[0]) and plain[1] == 0


def test_made_up_weights_do_not_find_the_kv_of_those_in_the_folder(llama: Path, server: CacheServer) -> None:
    ask = ["ask", sample_tokens(PROMPT_TOKENS, seed=70), 8]
    (real,) = run_engine(llama, server, [ask])
    made_up, emptied, again = run_engine(llama, server, [ask, LOCAL, ask], load_format="dummy")
    assert made_up[0] != real[0]
    assert made_up[1] == 0
    assert (emptied, again) == (True, [made_up[0], CHUNKED_TOKENS])


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_without_a_loop_resets_its_caches_while_stores_are_under_way(
    llama: Path, server: CacheServer, ranks: int
) -> None:
    """Its last request ends with the step that orders the store, and no step follows to report the end of it."""
    asks = [["ask", sample_tokens(PROMPT_TOKENS, seed=seed), 1] for seed in range(60, 64)]
    preempting: list[Any] = ["reset", {"reset_running_requests": True, "reset_connector": True}]
    calls = [asks[0], LOCAL, asks[1], WITH_CONNECTOR, asks[2], preempting, asks[3], LOCAL]
    assert run_engine(llama, server, calls, ranks=ranks)[1::2] == [True] * 4
