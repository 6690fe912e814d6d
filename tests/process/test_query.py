"""`lmcache query` on a real server with real objects in L1 and in a folder."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lmcache.cli.main import main
from lmcache.protocol import messages as m
from lmcache.protocol.tokens import pack_tokens
from lmcache.testing.processes import CacheServer
from lmcache.testing.tiny_models import LlamaShape, describe_llama, sample_text
from polling import until
from process.support import CALL_SECONDS, SmallEngine
from seeds import SEED

CHUNKS = 4
TEXTS = 60
# Latin letters and signs, controls, half of a pair of UTF-16, the rest of the first plane, those beyond it.
CHARACTERS = (range(32, 127), range(32), range(0xD800, 0xE000), range(128, 0xD800), range(0x1F300, 0x1FA00))


def tokens(chunks: int) -> list[int]:
    return [chunk for chunk in range(chunks) for _ in range(256)]


def test_a_prompt_is_found_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps([*tokens(CHUNKS + 1), 7]))

    def query(server: CacheServer, *words: str) -> tuple[int, Any, str]:
        url = f"http://127.0.0.1:{server.http_port}"
        code = main(["query", "--url", url, "--format", "json", *words])
        out, err = capsys.readouterr()
        return code, json.loads(out)["metrics"] if out else None, err

    with CacheServer(tmp_path, l1_size_gb=0.0625, l2_folder=tmp_path / "l2") as server:
        server.wait_ready()
        code, _, err = query(server, "--tokens-file", str(file))
        assert code == 2 and "No engine is registered" in err
        with SmallEngine(server.port) as engine:
            assert engine.store(engine.tokens(*range(CHUNKS)), salt="tenant") == CHUNKS
            until(lambda: server.status()["l2"]["adapters"][0]["objects"] == CHUNKS, 60)
            code, found, _ = query(server, "--tokens-file", str(file), "--salt", "tenant")
            disk = server.status()["l2"]["adapters"][0]["name"]
            assert code == 0
            assert (found["model_name"], found["tokens"], found["chunks"]) == ("model", len(tokens(CHUNKS + 1)) + 1, 5)
            assert (found["prefix_chunks"], found["hit_tokens"]) == (CHUNKS, CHUNKS * 256)
            assert found["tiers"] == {"l1": CHUNKS, disk: CHUNKS}
            assert [(part["first_chunk"], part["chunks"]) for part in found["ranges"]] == [(0, CHUNKS), (CHUNKS, 1)]
            assert query(server, "--tokens-file", str(file))[1]["prefix_chunks"] == 0
            server.clear("l1")
            assert query(server, "--tokens-file", str(file), "--salt", "tenant")[1]["tiers"] == {disk: CHUNKS}
            code, _, err = query(server, "--tokens", "1", "--model", "modell")
            assert code == 1 and "No engine of the model 'modell' is registered" in err and "--model model." in err
            code, _, err = query(server, "--text", "Once")
            assert code == 1 and "start the server with --tokenizer-dir, or send tokens" in err
            code, _, err = query(server, "--tokens", str(2**32))
            assert code == 1 and "tokens" in err


def test_text_is_the_tokens_that_an_engine_makes_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a tokenizer that begins prompts with <s>, and whose file asks for a cut and for padding, as many do."""
    transformers = pytest.importorskip("transformers")
    folder = describe_llama(tmp_path / "models" / "small", LlamaShape())
    plain = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(plain) | _LIKE_OTHERS))
    text = sample_text(900)
    (tmp_path / "prompt.txt").write_text(text)
    prompt = transformers.AutoTokenizer.from_pretrained(folder)(text).input_ids
    assert prompt[0] == 0 and len(prompt) > 768
    chunks = len(prompt) // 256
    options = ("--tokenizer-dir", str(tmp_path / "models"))
    with CacheServer(tmp_path, l1_size_gb=0.0625, l2_folder=tmp_path / "l2", extra=options) as server:
        server.wait_ready()

        def found(*words: str) -> list[list[str]]:
            """The tiers of each full chunk."""
            url = f"http://127.0.0.1:{server.http_port}"
            arguments = ["--url", url, "--format", "json", "--text-file", str(tmp_path / "prompt.txt")]
            assert main(["query", *arguments, *words]) == 0
            metrics = json.loads(capsys.readouterr().out)["metrics"]
            assert metrics["prefix_chunks"] == sum(part["chunks"] for part in metrics["ranges"] if part["tiers"])
            return [part["tiers"] for part in metrics["ranges"] for _ in range(part["chunks"])]

        with SmallEngine(server.port, model_name="small") as engine:
            assert engine.store(pack_tokens(prompt)) == chunks
            adapter = server.status()["l2"]["adapters"][0]["name"]
            until(lambda: server.status()["l2"]["adapters"][0]["objects"] == chunks, 60)
            assert found() == found("--tokenizer", str(folder)) == [["l1", adapter]] * chunks
            server.clear("l1")
            assert found() == [[adapter]] * chunks
            body = {"model_name": "small", "text": text}
            assert server.ask(server.http_port, "POST", "/cache/prefetches", body)[0] == 202
            until(lambda: found() == [["l1", adapter]] * chunks, 60)
            (folder / "tokenizer.json").write_text(plain)  # prompts begin without <s> from now on
            assert found() == [[]] * chunks


def test_a_long_text_holds_up_no_engine(tmp_path: Path) -> None:
    """Calls are answered while its tokens are made. One round suffices: others may fall into a stall of the machine."""
    describe_llama(tmp_path / "models" / "small", LlamaShape())
    sentence = sample_text(900)
    body = {"model_name": "small", "text": sentence * (512 * 1024 // len(sentence))}
    options = ("--tokenizer-dir", str(tmp_path / "models"))
    with CacheServer(tmp_path, l1_size_gb=0.0625, extra=options) as server, ThreadPoolExecutor(1) as beside:
        server.wait_ready()
        with SmallEngine(server.port, model_name="small") as engine:

            def longest_call_of_the_time() -> float:
                started = called = time.monotonic()
                answer, longest = beside.submit(server.ask, server.http_port, "POST", "/cache/lookup", body), 0.0
                while not answer.done():
                    engine.client.call("noop", m.Empty(), CALL_SECONDS)
                    longest, called = max(longest, time.monotonic() - called), time.monotonic()
                assert answer.result()[0] == 200
                return longest / (called - started)

            shares: list[float] = []
            while not shares or (min(shares) > 0.5 and len(shares) < 8):
                shares.append(longest_call_of_the_time())
    assert min(shares) <= 0.5, f"the longest call took these shares of the time that a text took: {shares}"


def test_whatever_a_text_has_is_answered(tmp_path: Path) -> None:
    """Texts have half characters and characters that nobody uses, and some are empty."""
    describe_llama(tmp_path / "models" / "small", LlamaShape())
    random_ = random.Random(SEED)
    options = ("--tokenizer-dir", str(tmp_path / "models"))

    def any_text() -> str:
        kinds = random_.sample(CHARACTERS, random_.randint(1, len(CHARACTERS)))
        return "".join(chr(random_.choice(random_.choice(kinds))) for _ in range(random_.choice((0, 1, 50, 3000))))

    with CacheServer(tmp_path, l1_size_gb=0.0625, extra=options) as server:
        server.wait_ready()
        with SmallEngine(server.port, model_name="small"):
            statuses: Counter[int] = Counter()
            for _ in range(TEXTS):
                body = {"model_name": "small", "text": any_text()}
                status, answer = server.ask(server.http_port, "POST", "/cache/lookup", body)
                assert status in (200, 400), (body, answer)
                statuses[status] += 1
        assert statuses[200] and statuses[400], statuses
        assert server.metric("lmcache_mp_internal_faults_total") == 0
        assert not [line for line in server.log().splitlines() if "ERROR" in line or "Traceback" in line]


_LIKE_OTHERS = {
    "truncation": {"direction": "Right", "max_length": 512, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        "strategy": {"Fixed": 2048},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 1,
        "pad_type_id": 0,
        "pad_token": "</s>",
    },
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    },
}
