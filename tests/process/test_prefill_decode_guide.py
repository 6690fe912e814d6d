"""docs/how-to/separate_prefill_and_decode.md: its commands as printed, but for sizes, with a real server and a real
router between small engines in place of vLLM; tests/e2e has them with vLLM."""

from __future__ import annotations

import json
import re
import shlex
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lmcache.integration.vllm.settings import ConnectorSettings
from lmcache.protocol.tokens import pack_tokens
from lmcache.testing.processes import LOOPBACK, http_json
from process.support import SmallEngine
from process.test_share_guide import Tour
from services import vllm_router
from services.network import Network, in_own_network, with_own_memory

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "separate_prefill_and_decode.md").read_text()
SERVER, PREFILL, DECODE, ROUTER, ASK = re.findall(r"^```bash\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
RPC_PORT, HTTP_PORT = 5555, 8080
ROUTER_PORT, PREFILL_PORT, DECODE_PORT = 8000, 8100, 8200
START_SECONDS = 120.0
HANDED_OVER = {"lmcache.test": {"address": "10.0.0.1:9500", "tokens": 2000}}

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class Engine(ThreadingHTTPServer):
    """What a router sees of an engine. `answer` makes JSON of a request for a completion."""

    daemon_threads = True

    def __init__(self, port: int, answer: Answer) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Engine

    def do_GET(self) -> None:
        self._send(200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            self._send(404, {})
            return
        self.server.bodies.append(body)
        self._send(200, self.server.answer(body))

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def engine_at(port: int, answer: Answer) -> Iterator[Engine]:
    engine = Engine(port, answer)
    thread = threading.Thread(target=lambda: engine.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        engine.shutdown()
        engine.server_close()
        thread.join(START_SECONDS)


def completion(text: str, **more: Any) -> dict[str, Any]:
    return {"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, "text": text}], **more}


def test_a_prompt_goes_to_one_engine_and_its_answer_comes_from_the_other(tmp_path: Path) -> None:
    router_program = shlex.join(vllm_router.command())

    def test(_: Network) -> None:
        with_own_memory()
        tour = Tour(tmp_path)
        program = tmp_path / "bin" / "vllm-router"
        program.write_text(f'#!/bin/sh\nexec {router_program} "$@"\n')
        program.chmod(0o755)
        tour.environment["MODEL"] = "small"
        server_line = SERVER.replace("--l1-size-gb 20", "--l1-size-gb 0.05")
        with tour.start(f"exec {server_line}", "server") as server:
            server.wait_until_ready(HTTP_PORT, "/healthcheck", START_SECONDS)
            with SmallEngine(RPC_PORT) as storing, SmallEngine(RPC_PORT) as loading:
                hand_over(tour, storing, loading)
            assert server.stop() == 0, server.log()

    in_own_network(test)


def hand_over(tour: Tour, storing: SmallEngine, loading: SmallEngine) -> None:
    def prefilled(body: dict[str, Any]) -> dict[str, Any]:
        assert storing.store(pack_tokens(body["prompt"])) == 7
        return completion("a", kv_transfer_params=HANDED_OVER)

    def decoded(body: dict[str, Any]) -> dict[str, Any]:
        reply = loading.lookup("decode", pack_tokens(body["prompt"]))
        assert loading.read(reply)
        loading.end("decode")
        usage = {"prompt_tokens": 2000, "prompt_tokens_details": {"cached_tokens": 256 * reply.chunks}}
        return completion(f"{reply.chunks} chunks", usage=usage)

    with engine_at(DECODE_PORT, decoded) as decode:
        with (
            engine_at(PREFILL_PORT, prefilled) as prefill,
            tour.start(f"exec {ROUTER}", "router") as router,
        ):
            router.wait_until_ready(ROUTER_PORT, "/health", START_SECONDS)
            assert tour.run(ASK).strip().endswith(" 1792.0")
            assert "cached_tokens" not in (tour.folder / "answer.json").read_text(), "the guide says so"
            (asked,), (answered,) = prefill.bodies, decode.bodies
            assert (asked["max_tokens"], asked["stream"]) == (1, False)
            assert asked["kv_transfer_params"]["do_remote_decode"] is True
            assert (answered["max_tokens"], answered["kv_transfer_params"]) == (16, HANDED_OVER)
            assert asked["prompt"] == answered["prompt"]
            prefill.shutdown()
            prefill.server_close()
            status, _ = http_json(ROUTER_PORT, "POST", "/v1/completions", answered, 60.0)
            assert status in (500, 503), "the guide says so"
        status, answer = http_json(DECODE_PORT, "POST", "/v1/completions", answered)
        assert (status, answer["choices"][0]["text"]) == (200, "7 chunks")


def test_the_engines_of_the_guide_are_for_its_server_and_its_router() -> None:
    router = shlex.split(ROUTER)
    for engine, role, port, option in (
        (PREFILL, "kv_both", PREFILL_PORT, "--prefill"),
        (DECODE, "kv_consumer", DECODE_PORT, "--decode"),
    ):
        words = shlex.split(engine)
        transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
        assert (transfer["kv_connector"], transfer["kv_role"]) == ("LMCacheMPConnector", role)
        settings = ConnectorSettings.read(transfer.get("kv_connector_extra_config", {}))
        assert settings.url in (f"tcp://{name}:{RPC_PORT}" for name in (LOOPBACK, "localhost"))
        assert words[words.index("--port") + 1] == str(port)
        assert router[router.index(option) + 1] == f"http://{LOOPBACK}:{port}"
