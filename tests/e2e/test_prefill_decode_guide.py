"""docs/how-to/separate_prefill_and_decode.md with real engines: its commands as printed, but for the size of L1, with a
small model in a network of their own. The answer is that of one engine alone."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import until
from e2e.test_tutorial import Reader, counted
from lmcache.integration.vllm.handover import SOURCE_KEY
from lmcache.testing.processes import ManagedProcess, http_json
from services import vllm_router
from services.network import Network, in_own_network, with_own_memory
from support.router_requests import FOR_PREFILL
from support.telemetry_proxy import TelemetryProxy, telemetry_proxy

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "separate_prefill_and_decode.md").read_text()
SERVER, PREFILL, DECODE, ROUTER, ASK = re.findall(r"^```bash\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
HTTP_PORT, ROUTER_PORT, PREFILL_PORT, DECODE_PORT = 8080, 8000, 8100, 8200
WHOLE_TOKENS, CHUNKS = 1792, 7
START_SECONDS = 900.0
WAITS = "lmcache_mp_handover_waits_total"


class Tour:
    """The guide's processes, and what is asked of them."""

    def __init__(self, folder: Path, model: Path, proxy: TelemetryProxy) -> None:
        self.reader = Reader(folder, model)
        self.proxy = proxy
        self._loaded_tokens = 0
        program = folder / "bin" / "vllm-router"
        program.write_text(f'#!/bin/sh\nexec {shlex.join(vllm_router.command())} "$@"\n')
        program.chmod(0o755)
        self.reader.environment |= {
            "VLLM_SERVER_DEV_MODE": "1",
            "LMCACHE_REQUEST_TELEMETRY_TYPE": "fastapi",
            "LMCACHE_REQUEST_TELEMETRY_ENDPOINT": proxy.url,
        }

    def start(self, block: str, name: str, cpu: int = 0) -> ManagedProcess:
        """Engines compute on that processor alone: two that share theirs wait for each other in every layer."""
        self.reader.environment["VLLM_CPU_OMP_THREADS_BIND"] = str(min(cpu, (os.cpu_count() or 1) - 1))
        fitted = block.replace("--l1-size-gb 20", "--l1-size-gb 0.5")
        return self.reader.start(fitted.replace("--port 8200", "--port 8200 --enable-prompt-tokens-details"), name)

    def forget(self) -> None:
        """Neither the server nor an engine has anything of a prompt."""
        until(lambda: http_json(HTTP_PORT, "POST", "/cache/clear", {"tier": "all"})[0] == 200)
        for port in (PREFILL_PORT, DECODE_PORT):
            until(lambda port=port: http_json(port, "POST", "/reset_prefix_cache")[1].get("success", True))

    def objects(self) -> int:
        return int(http_json(HTTP_PORT, "GET", "/status")[1]["l1"]["objects"])

    def hand_over(self) -> tuple[int, str]:
        """Tokens that the decode engine loaded, and the answer. The proxy is told once, when all is stored."""
        self.forget()
        told, loaded = len(self.proxy.told), self._loaded_tokens
        self._loaded_tokens = round(counted(self.reader.run(ASK)))
        until(lambda: len(self.proxy.told) > told)
        assert self.objects() >= CHUNKS
        return self._loaded_tokens - loaded, json.loads((self.reader.folder / "answer.json").read_text())["choices"][0][
            "text"
        ]

    def question(self) -> dict[str, Any]:
        return dict(json.loads((self.reader.folder / "prompt.json").read_text()))

    def complete(self, port: int, **fields: Any) -> dict[str, Any]:
        """The answer of one engine alone, with those fields in the question."""
        status, answer = http_json(port, "POST", "/v1/completions", self.question() | fields, 300.0)
        assert status == 200, answer
        return dict(answer)

    def ask(self, port: int) -> tuple[int, str]:
        """One engine alone: tokens that it loaded or had, and the answer."""
        answer = self.complete(port)
        details: dict[str, Any] = answer["usage"].get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0), str(answer["choices"][0]["text"])

    def waits(self) -> float:
        """Lookups that have waited for the store of another engine."""
        return counted(self.reader.run(f"curl --silent --fail localhost:{HTTP_PORT}/metrics | grep {WAITS} || true"))


def test_the_guide(tmp_path: Path, llama: Path) -> None:
    def test(_: Network) -> None:
        with_own_memory()
        with telemetry_proxy() as proxy:
            tour = Tour(tmp_path, llama, proxy)
            with tour.start(SERVER, "server") as server:
                server.wait_until_ready(HTTP_PORT, "/readyz", 60.0)
                with tour.start(PREFILL, "prefill") as prefill, tour.start(DECODE, "decode", 1) as decode:
                    prefill.wait_until_ready(PREFILL_PORT, "/health", START_SECONDS)
                    decode.wait_until_ready(DECODE_PORT, "/health", START_SECONDS)
                    until(lambda: len(http_json(HTTP_PORT, "GET", "/status")[1]["instances"]) == 2)
                    with tour.start(ROUTER, "router") as router:
                        router.wait_until_ready(ROUTER_PORT, "/health", 120.0)
                        follow(tour, prefill)
                assert server.stop() == 0, server.log()

    in_own_network(test)


def follow(tour: Tour, prefill: ManagedProcess) -> None:
    answers = [tour.hand_over() for _ in range(3)]
    assert all(loaded >= WHOLE_TOKENS for loaded, _ in answers), answers
    told = tour.proxy.told
    assert len(told) == len(answers) and len(set(told)) == len(told)
    assert all("prefill_addr" in request_id for request_id in told), "a part of each is the router's X-Request-Id"
    tour.forget()
    cached, alone = tour.ask(DECODE_PORT)
    assert cached == 0 and {text for _, text in answers} == {alone}
    engines_hand_over(tour)
    tour.hand_over()
    prefill.kill()
    http_json(DECODE_PORT, "POST", "/reset_prefix_cache")
    cached, text = tour.ask(DECODE_PORT)
    assert cached >= WHOLE_TOKENS and text == alone


def engines_hand_over(tour: Tour) -> None:
    """The prefill engine names what it stores, and the decode engine has the server wait for what it is told of: here
    for a prompt that nobody stores."""
    tour.forget()
    told, waits = len(tour.proxy.told), tour.waits()
    params = tour.complete(PREFILL_PORT, max_tokens=1, kv_transfer_params=FOR_PREFILL)["kv_transfer_params"]
    assert params[SOURCE_KEY]["tokens"] >= WHOLE_TOKENS
    until(lambda: len(tour.proxy.told) > told)
    tour.complete(DECODE_PORT, prompt=tour.question()["prompt"][::-1], kv_transfer_params=params)
    assert tour.waits() == waits + 1
