"""docs/how-to/let_the_engine_start_the_server.md: its commands and its script as printed, but for the size of L1, with
a small model in a network of their own. Nothing is run beside the engine, and nothing is left after it."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import until
from e2e.test_tutorial import VLLM_PORT, Reader
from lmcache.testing.processes import http_json
from services.network import Network, in_own_network, with_own_memory

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "let_the_engine_start_the_server.md").read_text()
AUTOSTART, INSIDE, SCRIPT = (
    textwrap.dedent(block).strip() for block in re.findall(r"(?:^(?: {4}.*)?\n)+", GUIDE, re.M) if block.strip()
)
FILE = "chunk_size: 256\nmax_local_cpu_size: 0.25\n"  # the guide leaves its keys to the reader
PROMPT = [7 + at * 31 % 900 for at in range(1200)]
HIT_TOKENS = 1024  # whole chunks of the prompt
ANSWER_TOKENS = 8
START_SECONDS = 600.0
# What a CPU needs, and what the guide leaves to the reader: to ask.
ON_CPU = 'dtype="float32", enforce_eager=True, max_model_len=4096, max_num_seqs=2, seed=0, enable_prefix_caching=False'
ASKED = f"""
from vllm import SamplingParams
sampling = SamplingParams(temperature=0.0, max_tokens={ANSWER_TOKENS}, ignore_eos=True)
for _ in range(3):
    (output,) = llm.generate({{"prompt_token_ids": {PROMPT}}}, sampling, use_tqdm=False)
    print("ANSWER", output.num_cached_tokens, list(output.outputs[0].token_ids), flush=True)
"""


def left_over() -> list[str]:
    """L1 and the folder of owned servers, in this thread's memory."""
    return [path.name for path in Path("/dev/shm").glob("lmcache*")]


def following(test: Callable[[Reader], None], folder: Path, model: Path) -> None:
    def in_namespaces(_: Network) -> None:
        with_own_memory()
        reader = Reader(folder, model)
        reader.environment["VLLM_SERVER_DEV_MODE"] = "1"
        test(reader)
        until(lambda: not left_over(), 30.0, tell=left_over)

    in_own_network(in_namespaces)


def ask() -> tuple[int, str]:
    """Tokens that the engine had not to compute, and the answer. Its own cache is empty before."""
    until(lambda: http_json(VLLM_PORT, "POST", "/reset_prefix_cache")[1].get("success", True))
    question: dict[str, Any] = {"prompt": PROMPT, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    status, answer = http_json(VLLM_PORT, "POST", "/v1/completions", question, 300.0)
    assert status == 200, answer
    details = answer["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0), str(answer["choices"][0]["text"])


def serve(reader: Reader, command: str) -> None:
    fitted = command.replace("vllm serve MODEL", 'vllm serve "$MODEL" --enable-prompt-tokens-details')
    assert fitted != command
    with reader.start(fitted.replace("--l1-size-gb 20", "--l1-size-gb 0.25"), "vllm") as engine:
        engine.wait_until_ready(VLLM_PORT, "/health", START_SECONDS)
        assert left_over(), "a server that the engine has started"
        cached, computed = ask()
        assert cached == 0
        hit = until(lambda: (answer := ask())[0] and answer)  # 0 until the store has ended
        assert hit == (HIT_TOKENS, computed)


def test_the_engine_starts_the_server(tmp_path: Path, llama: Path) -> None:
    following(lambda reader: serve(reader, AUTOSTART), tmp_path, llama)


def test_lmcache_inside_the_engine(tmp_path: Path, llama: Path) -> None:
    export, command = INSIDE.split("\n", 1)
    name, file = export.removeprefix("export ").split("=")

    def test(reader: Reader) -> None:
        (tmp_path / file).write_text(FILE)
        reader.environment[name] = file
        serve(reader, command)

    following(test, tmp_path, llama)


def test_the_script(tmp_path: Path, llama: Path) -> None:
    fitted = SCRIPT.replace('"MODEL"', f'"{llama}", {ON_CPU}').replace('_size": 20', '_size": 0.25')
    assert fitted.count(ON_CPU) == 1 and '_size": 0.25' in fitted

    def test(reader: Reader) -> None:
        (tmp_path / "script.py").write_text(fitted + textwrap.indent(ASKED, "    "))
        said = [
            line.split(" ", 2) for line in reader.run("python3 script.py").splitlines() if line.startswith("ANSWER ")
        ]
        (_, _, computed), *_ = said
        assert [(int(cached), json.loads(tokens)) for _, cached, tokens in said] == [
            (cached, json.loads(computed)) for cached in (0, HIT_TOKENS, HIT_TOKENS)
        ]

    following(test, tmp_path, llama)
