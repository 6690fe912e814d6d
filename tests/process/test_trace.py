"""A trace of real lookups is recorded, described and replayed against servers of other options."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from lmcache.cli.main import main
from lmcache.core.limits import MIB
from process.support import SmallEngine, server_within

PAYLOAD_BYTES = 65_536


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(list(words) if "--format" in words else [*words, "--format", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["metrics"]
    return found


@pytest.fixture
def recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """40 lookups of 10 prompts of three chunks, one after the other, on a server that keeps all."""
    log = tmp_path / "log"
    with (
        server_within(lookup_hash_log_dir=str(log), chunk_size=16) as server,
        SmallEngine(server.rpc.endpoint, payload_bytes=PAYLOAD_BYTES) as engine,
    ):
        for number in range(40):
            tokens = engine.tokens(1, 100 + number % 10, 200 + number % 10)
            engine.lookup(f"a secret {number}", tokens, salt="tenant")
            engine.end(f"a secret {number}")
            engine.store(tokens, salt="tenant")
    trace = tmp_path / "trace.jsonl"
    assert figures(capsys, "trace", "record", str(log), "--to", str(trace))["lookups"] == 40
    return trace


def test_a_trace_is_replayed_as_it_was_and_with_less_memory(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = recorded.read_text()
    assert "tenant" not in text and "secret" not in text
    (digest,) = set(re.findall("salt-[0-9a-f]+", text))
    again = recorded.with_name("again.jsonl")
    figures(capsys, "trace", "record", str(recorded.parent / "log"), "--to", str(again))
    assert digest not in again.read_text(), "whoever guesses a salt could look for its digest"
    about = figures(capsys, "trace", "info", str(recorded))
    assert about["lookups"] == 40 and about["requested_chunks"] == 120 and about["chunk_tokens"] == [16]
    endless = (30 * 3 + 9) / 120
    assert about["ceiling"] == pytest.approx(endless) == pytest.approx(about["hit_rate"])
    options = ["--eviction-policy", "LRU", "--shm-name", f"replay-{os.getpid()}-{recorded.parent.name}"]
    replayed = ["trace", "replay", str(recorded), "--chunk-mb", str(PAYLOAD_BYTES / MIB), "--format", "json", "--"]
    large = figures(capsys, *replayed, "--l1-size-gb", "0.05", *options)
    assert large["hit_rate"] == pytest.approx(endless, abs=1e-5) and large["hit_rate_l2"] == 0
    assert large["lookup_p50_ms"] > 0 and large["chunks_without_room"] == 0
    small = figures(capsys, *replayed, "--l1-size-gb", "0.0007", *options)
    assert small["hit_rate"] < large["hit_rate"]


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text("")
    assert main(["trace", "replay", str(trace)]) == 2
    assert "needs a server: --rpc-url, or options" in capsys.readouterr().err
    assert main(["trace", "replay", str(trace), "--rpc-url", "tcp://127.0.0.1:1"]) == 2
    assert "must have lookups of one chunk size" in capsys.readouterr().err
    with server_within() as server:
        url = f"http://127.0.0.1:{server.config.http_port}"
        assert main(["trace", "record", "--url", url, "--to", str(trace)]) == 2
    assert "start it with --lookup-hash-log-dir" in capsys.readouterr().err
