"""`lmcache query` without a server: prompts that are read, answers that are summed up."""

from __future__ import annotations

import contextlib
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lmcache.cli import main as cli
from lmcache.cli.query import report_of, token_ids
from lmcache.errors import ConfigError


def answer(*tiers: list[str]) -> dict[str, Any]:
    prefix = next((number for number, found in enumerate(tiers) if not found), len(tiers))
    chunks = [{"hash": f"{number:064x}", "tiers": found} for number, found in enumerate(tiers)]
    return {"chunk_tokens": 16, "prefix_chunks": prefix, "chunks": chunks}


BODY = {"model_name": "m", "cache_salt": "", "tokens": list(range(90))}


@pytest.mark.parametrize("text", ["1,15043,3186", "[1, 15043, 3186]\n", " 1 15043\n3186 ", "1,\n15043,\n3186,"])
def test_token_ids(text: str) -> None:
    assert token_ids(text, "--tokens") == [1, 15043, 3186]


@pytest.mark.parametrize(("text", "got"), [("1,-2", "'-2'"), ("hello", "'hello'"), ("[]", "none"), ("1.5", "'1.5'")])
def test_what_is_no_token_is_named(text: str, got: str) -> None:
    with pytest.raises(ConfigError, match="must have token ids like 1,15043,3186") as caught:
        token_ids(text, "--tokens")
    assert got in str(caught.value)


def test_chunks_on_the_same_tiers_are_one_row() -> None:
    both, disk = ["l1", "disk"], ["disk"]
    report = report_of(BODY, answer(both, both, disk, [], disk))
    assert report.metrics["ranges"] == [
        {"first_chunk": 0, "chunks": 2, "first_token": 0, "tokens": 32, "tiers": both},
        {"first_chunk": 2, "chunks": 1, "first_token": 32, "tokens": 16, "tiers": disk},
        {"first_chunk": 3, "chunks": 1, "first_token": 48, "tokens": 16, "tiers": []},
        {"first_chunk": 4, "chunks": 1, "first_token": 64, "tokens": 16, "tiers": disk},
    ]
    assert report.metrics["tiers"] == {"l1": 2, "disk": 4}
    assert (report.metrics["prefix_chunks"], report.metrics["hit_tokens"]) == (3, 48)
    shown = report.render("terminal")
    assert "3 of 5 chunks, 48 tokens" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["0-1", "0-31", "l1,", "disk"] in rows and ["3", "48-63", "-"] in rows


def test_a_prompt_below_a_chunk_is_explained() -> None:
    assert "shorter than a chunk of 16 tokens" in report_of(BODY, answer()).render("terminal")


def test_a_partial_chunk_is_said() -> None:
    partial = {"hash": "cd" * 32, "tiers": ["l1", "disk"], "in_l1": [0], "tokens": 12}
    report = report_of(BODY, {**answer(["l1"]), "partial_chunks": [partial]})
    assert "A partial chunk of 12 tokens is behind them: l1, disk" in report.render("terminal")
    assert report.metrics["partial_chunks"] == [partial]


def test_prompts_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    for words, said in (
        ((), "takes one prompt, got none: give one of --tokens, --tokens-file, --text, --text-file."),
        (("--tokens", "1", "--text", "x"), "takes one prompt, got --tokens and --text"),
        (("--tokens-file", str(tmp_path / "none")), "none cannot be read: No such file or directory."),
        (("--text-file", str(tmp_path / "bytes")), "is not text in UTF-8."),
        (("--text-file", "-"), "--text-file - is empty."),
        (("--text", "x", "--tokenizer", str(tmp_path / "none")), "must be a folder with tokenizer.json"),
        (("--text", "x", "--tokenizer", str(tmp_path)), "tokenizer.json of --tokenizer cannot be read"),
    ):
        assert cli.main(["query", *words]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert said in err


def test_errors_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["query", "--tokens", "1", "--url", "http://127.0.0.1:1", "--format", "json"]) == 1
    assert "is the server running there?" in json.loads(capsys.readouterr().err)["error"]


def test_text_becomes_tokens_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"once": 7, "upon": 8, "[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "prompt.txt").write_text("once upon once")
    with answering({"/cache/lookup": answer(["l1"])}) as (url, bodies):
        asked = ["query", "--url", url, "--model", "m", "--tokenizer", str(tmp_path)]
        assert cli.main([*asked, "--text-file", str(tmp_path / "prompt.txt")]) == 0
        assert "1 of 1 chunks" in capsys.readouterr().out
        assert bodies[-1]["tokens"] == [7, 8, 7]
        assert cli.main(["query", "--url", url, "--model", "m", "--text", "once"]) == 0
        assert bodies[-1]["text"] == "once" and "tokens" not in bodies[-1]


@contextlib.contextmanager
def answering(answers: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An HTTP server's URL, and the bodies that it has been sent."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answers[self.path]).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()
        thread.join()
