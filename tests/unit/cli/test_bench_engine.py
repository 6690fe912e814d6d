"""`lmcache bench engine` against a small OpenAI-compatible server that answers well, and one that does not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import xml.dom.minidom
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmcache.cli import main as cli
from lmcache.cli.engine_bench.completion_client import Asker, Outcome
from lmcache.cli.engine_bench.figures import percentile, spread
from lmcache.cli.engine_bench.load_generator import Load, Pace
from lmcache.cli.engine_bench.workloads import WORKLOADS, Piece, Session, Shape, ids_of, text_of
from lmcache.simulation.trace import Lookup, write_trace
from polling import until
from support.openai_server import MODEL, OpenAIServer, openai_server, words_of

SMALL = ("--prompt-tokens", "64", "--question-tokens", "8", "--output-tokens", "4", "--concurrency", "3")


@pytest.fixture
def openai() -> Iterator[OpenAIServer]:
    with openai_server() as server:
        yield server


def bench(capsys: pytest.CaptureFixture[str], openai: OpenAIServer, *words: str) -> tuple[int, dict[str, Any], str]:
    """The exit code, the result, and what was said on stderr."""
    code = cli.main(["bench", "engine", "--url", openai.url, *words, "--format", "json"])
    out, err = capsys.readouterr()
    return code, json.loads(out)["metrics"] if out else {}, err


# ---- workloads -------------------------------------------------------------------------------------------------------
def test_prompts_are_the_same_for_a_seed_and_share_what_their_workload_says() -> None:
    shape = Shape(requests=12, prefixes=3, prompt_tokens=50, question_tokens=5, turns=5, output_tokens=1)
    for workload in WORKLOADS.values():
        stages = workload.make(shape, 7)
        assert stages == workload.make(shape, 7) != workload.make(shape, 8)
        assert sum(len(session.turns) for stage in stages for session in stage) == 12
    first, later = WORKLOADS["long-doc-qa"].make(shape, 7)
    assert len(first) == len({session.opening for session in first}) == 3
    assert {session.opening for session in later} <= {session.opening for session in first}
    (chat,) = WORKLOADS["multi-round-chat"].make(shape, 7)
    assert [len(session.turns) for session in chat] == [5, 5, 2]
    (agents,) = WORKLOADS["shared-prefix"].make(shape, 7)
    assert sum(session.turns[0].label == "first of its prefix" for session in agents) == len(
        {session.opening for session in agents}
    )
    (prefills,) = WORKLOADS["random-prefill"].make(shape, 7)
    assert len({session.turns[0].question.name for session in prefills}) == 12
    assert len(text_of(Piece("x", 1000)).split()) == 1000
    ids = ids_of(Piece("x", 1000), 50)
    assert len(ids) == 1000 and min(ids) >= 3 and max(ids) < 50


# ---- a server that answers -------------------------------------------------------------------------------------------
def test_questions_about_documents_hit_from_the_second_on(
    capsys: pytest.CaptureFixture[str], openai: OpenAIServer
) -> None:
    code, result, err = bench(capsys, openai, *SMALL, "--requests", "12", "--prefixes", "3")
    assert (code, err) == (0, "")
    figures = result["figures"]
    assert (figures["completed"], figures["failed"], figures["unsent"], figures["stopped"]) == (12, 0, 0, "")
    assert figures["prompt_tokens"] == 12 * (64 + 8)
    assert figures["output_tokens"] == 12 * 4
    assert figures["cached_tokens"] == 9 * 64
    assert figures["cached_ratio"] == pytest.approx(9 * 64 / (12 * 72), abs=1e-4)
    assert figures["labels"]["first question"]["cached_tokens"] == 0
    assert figures["labels"]["later question"]["completed"] == 9
    for key in ("ttft_ms", "itl_ms", "tpot_ms", "total_ms"):
        times = figures[key]
        assert 0 < times["p50"] <= times["p90"] <= times["p99"] <= times["max"]
    assert figures["ttft_ms"]["max"] <= figures["total_ms"]["max"]
    assert figures["requests_per_second"] == pytest.approx(12 / figures["wall_seconds"], rel=0.2)
    assert result["settings"]["model"] == MODEL
    assert {body["model"] for body in openai.bodies} == {MODEL}


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_conversation_sends_all_that_was_said(
    capsys: pytest.CaptureFixture[str], openai: OpenAIServer, api: str
) -> None:
    words = (*SMALL, "--workload", "multi-round-chat", "--requests", "6", "--turns", "3", "--api", api)
    code, result, _ = bench(capsys, openai, *words, "--concurrency", "1")
    assert code == 0
    lengths = [len(words_of(body)) for body in openai.bodies[1:]]
    assert lengths == [72, 84, 96] * 2  # a question of 8 and an answer of 4 more
    assert "w3é" in words_of(openai.bodies[2])
    assert list(result["figures"]["labels"]) == ["turn 1", "turn 2", "turn 3"]
    assert result["figures"]["output_tokens"] == 24
    assert set(openai.paths) == {"/v1/chat/completions" if api == "chat" else "/v1/completions"}


def test_random_times_and_token_ids(capsys: pytest.CaptureFixture[str], openai: OpenAIServer, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    words = ("--workload", "random-prefill", "--requests", "10", "--prompt-tokens", "32", "--rate", "200")
    words = (*words, "--token-ids", "1000", "--ignore-eos", "--api-key-file", str(key))
    code, result, _ = bench(capsys, openai, *words)
    assert code == 0
    figures = result["figures"]
    assert (figures["completed"], figures["prompt_tokens"], figures["cached_tokens"]) == (10, 320, 0)
    assert figures["late_ms"]["p50"] < 1000
    assert all(body["ignore_eos"] for body in openai.bodies)
    assert all(3 <= number < 1000 for body in openai.bodies for number in body["prompt"])
    assert {headers["Authorization"] for headers in openai.headers} == {"Bearer secret"}
    assert "secret" not in json.dumps(result)


def test_a_trace_keeps_what_its_prompts_shared(
    capsys: pytest.CaptureFixture[str], openai: OpenAIServer, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    shared, other = b"\1" * 32, b"\2" * 32
    lookups = [
        Lookup(0.0, "m", "", 16, shared + other),
        Lookup(0.1, "m", "", 16, shared + b"\3" * 32, hit_chunks=1),
        Lookup(0.2, "m", "tenant", 16, shared + other),
        Lookup(0.3, "m", "", 16, b""),
    ]
    write_trace(str(trace), lookups)
    code, result, _ = bench(capsys, openai, "--workload", "trace", "--trace", str(trace), "--speed", "2")
    assert code == 0
    figures = result["figures"]
    assert (figures["completed"], figures["prompt_tokens"], figures["cached_tokens"]) == (3, 96, 16)
    assert figures["labels"]["hit when recorded"]["cached_tokens"] == 16
    assert figures["wall_seconds"] >= 0.1
    sent = [request["sent"] for request in result["requests"]]
    assert sent == sorted(sent)


def test_servers_that_tell_less_are_measured_too(capsys: pytest.CaptureFixture[str], openai: OpenAIServer) -> None:
    openai.faults = {1: "old"}
    code = cli.main(["bench", "engine", "--url", openai.url + "/v1/", *SMALL, "--requests", "4"])
    out = capsys.readouterr().out
    assert code == 0
    assert "does not tell cached tokens" in out and "Prompt tokens" not in out
    assert sum("stream_options" in body for body in openai.bodies) == 1


# ---- a server that fails ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("silent", "nothing came for 0.2 s"),
        ("stalls", "nothing came for 0.2 s"),
        ("hangs up", "the connection broke: the server closed it"),
        ("refused", "HTTP 400: This model's maximum context length is 4096 tokens."),
        ("ends early", "the stream ended early"),
        ("error", "the stream ended with an error: out of memory"),
        ("garbage", "what came is not JSON as the OpenAI API has it"),
        ("other types", "what came is not JSON as the OpenAI API has it"),
        ("other usage", "what came is not JSON as the OpenAI API has it"),
    ],
)
def test_a_fault_ends_the_run_with_what_was_measured(
    capsys: pytest.CaptureFixture[str], openai: OpenAIServer, fault: str, said: str
) -> None:
    openai.faults = {6: fault}
    timeout = "0.2" if said.startswith("nothing came") else "20"
    words = (*SMALL, "--requests", "500", "--prefixes", "3", "--timeout", timeout, "--concurrency", "2")
    code, result, _ = bench(capsys, openai, *words)
    figures = result["figures"]
    assert code == 1
    assert figures["completed"] == 4 and figures["ttft_ms"]["p50"] > 0
    assert figures["errors"] == {said: figures["failed"]}
    assert figures["failed"] >= 8 and figures["unsent"] == 500 - 4 - figures["failed"]
    assert figures["stopped"] == "the last 8 requests all failed"


class Deaf(Asker):
    """Each request fails, and loses the cancellation that comes while it is under way."""

    def __init__(self) -> None:
        self.asked = 0

    async def ask(self, session: Session, turn: int, answers: Sequence[str], outcome: Outcome) -> None:
        self.asked += 1
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.001)
        outcome.error = "fault"


def test_a_run_that_stops_sends_no_more_though_cancellations_are_lost() -> None:
    deaf = Deaf()
    stages = WORKLOADS["random-prefill"].make(Shape(500, 1, 16, 1, 1, 1), 7)
    measured = asyncio.run(Load(deaf, Pace(2, 0.0, 0.0, 60.0, 7)).run(stages))
    assert measured.stopped == "the last 8 requests all failed"
    assert deaf.asked == len(measured.outcomes) <= 8 + 2


def test_a_fault_that_passes_is_counted(capsys: pytest.CaptureFixture[str], openai: OpenAIServer) -> None:
    openai.faults = {4: "hangs up", 6: ""}
    words = (*SMALL, "--requests", "20", "--concurrency", "1")
    code, result, _ = bench(capsys, openai, *words)
    assert code == 1
    assert (result["figures"]["completed"], result["figures"]["failed"], result["figures"]["stopped"]) == (18, 2, "")


def test_nobody_there_is_one_sentence(capsys: pytest.CaptureFixture[str], openai: OpenAIServer) -> None:
    assert cli.main(["bench", "engine", "--url", "http://127.0.0.1:1"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "its first request failed: no connection: " in err and "Is an engine running there" in err
    openai.faults = {1: "refused"}
    code, _, err = bench(capsys, openai)
    assert code == 1 and "HTTP 400: This model's maximum" in err


def test_a_run_ends_in_time_and_by_ctrl_c(
    capsys: pytest.CaptureFixture[str], openai: OpenAIServer, tmp_path: Path
) -> None:
    openai.faults = {4: "stalls"}
    words = (*SMALL, "--requests", "9", "--prefixes", "9", "--concurrency", "1")
    code, result, _ = bench(capsys, openai, *words, "--max-seconds", "0.5")
    assert code == 1 and result["figures"]["completed"] == 2
    assert result["figures"]["stopped"] == "the run took longer than --max-seconds 0.5"
    openai.faults = {len(openai.bodies) + 4: "stalls"}
    command = [sys.executable, "-m", "lmcache.cli.main", "bench", "engine", "--url", openai.url, *words]
    begun = len(openai.bodies)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: len(openai.bodies) >= begun + 4, 30)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "Ended early: it was interrupted." in out
    assert "Traceback" not in err


# ---- results ---------------------------------------------------------------------------------------------------------
def test_two_runs_side_by_side_with_plots(
    capsys: pytest.CaptureFixture[str], openai: OpenAIServer, tmp_path: Path
) -> None:
    files = [str(tmp_path / name) for name in ("cold.json", "warm.json")]
    for file in files:
        words = ("--workload", "random-prefill", "--requests", "5", "--prompt-tokens", "32", "--save", file)
        code, result, _ = bench(capsys, openai, *words, "--plot", str(tmp_path / "plots"))
        assert code == 0
        assert json.loads(Path(file).read_text())["metrics"] == result
    assert cli.main(["bench", "engine", "--compare", *files, "--plot", str(tmp_path / "both"), "--format", "json"]) == 0
    compared = json.loads(capsys.readouterr().out)["metrics"]
    assert compared["differing_settings"] == []
    assert compared["figures"]["cached_tokens"] == {"first": 0, "second": 5 * 32, "change": None}
    assert compared["figures"]["prompt_tokens"] == {"first": 160, "second": 160, "change": 0.0}
    assert "ttft_ms.p99" in compared["figures"]
    cold = json.loads(Path(files[0]).read_text())  # of a server that tells nothing of its cache
    cold["metrics"]["figures"]["cached_tokens"] = None
    del cold["metrics"]["settings"]["speed"]
    silent = tmp_path / "silent.json"
    silent.write_text(json.dumps(cold))
    assert cli.main(["bench", "engine", "--compare", str(silent), files[1], "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["metrics"]
    assert found["figures"]["cached_tokens"] == {"first": None, "second": 5 * 32, "change": None}
    assert found["differing_settings"] == ["speed"]
    for folder, curves in (("plots", 1), ("both", 2)):
        for name in ("ttft-distribution.svg", "ttft-over-time.svg"):
            drawing = xml.dom.minidom.parse(str(tmp_path / folder / name))
            drawn = drawing.getElementsByTagName("polyline" if "distribution" in name else "circle")
            assert len(drawn) == (curves if "distribution" in name else curves * 5)
    assert cli.main(["bench", "engine", "--compare", *files]) == 0
    assert "ttft_ms.p50" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--workload", "trace"), "--workload trace and --trace FILE need each other"),
        (("--speed", "2"), "--speed is the pace of a recorded trace"),
        (("--workload", "trace", "--trace", "x", "--turns", "2"), "--workload trace has no use for --turns: leave"),
        (("--prefixes", "2", "--turns", "2", "--workload", "random-prefill"), "for --prefixes and --turns: leave"),
        (("--workload", "trace", "--trace", "/none"), "/none does not exist"),
        (("--workload", "multi-round-chat", "--token-ids", "100"), "--token-ids needs --api completions"),
        (("--api-key-file", "/none"), "--api-key-file /none cannot be read: No such file"),
        (("--workload", "chat"), "--workload must be one of long-doc-qa, multi-round-chat"),
        (("--compare", "/none", "/none"), "/none cannot be read: No such file"),
        (("--compare", __file__, __file__), "is no result of lmcache bench engine: write one with --save FILE."),
        (("--url", "ftp://x"), "--url must be like"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    assert cli.main(["bench", "engine", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_percentiles() -> None:
    values = [float(number) for number in range(101)]
    assert [percentile(values, percent) for percent in (0, 50, 99, 100)] == [0, 50, 99, 100]
    assert percentile([3.0, 1.0], 50) == 2.0 and percentile([4.0], 99) == 4.0
    assert spread([]) is None
    assert spread([0.001, 0.003]) == {"mean": 2.0, "p50": 2.0, "p90": 2.8, "p99": 2.98, "max": 3.0}
