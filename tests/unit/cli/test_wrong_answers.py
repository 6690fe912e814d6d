"""Commands against servers whose answers have no end, other types, or what would command a terminal."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lmcache.cli import main as cli
from polling import STALL_SECONDS

Answer = Callable[[socket.socket], None]
OK = b"HTTP/1.1 200 OK\r\n"
ORDER = "\x1b]0;mine\x07\x1b[2Jsalt\nline"
TIMEOUT_SECONDS = 0.3


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """The URL of a server that reads the head of a request and leaves the rest to `answer`."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def one(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            while b"\r\n\r\n" not in client.recv(65536):
                pass
            answer(client)
            client.shutdown(socket.SHUT_WR)
            while client.recv(65536):  # a close before that would reset the connection
                pass

    def serve() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                threading.Thread(target=one, args=(listener.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


def whole(body: Any, status: int = 200) -> Answer:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n".encode()
    return lambda client: client.sendall(head + text)


def again(before: bytes, part: bytes, pause_seconds: float = 0.1) -> Answer:
    """Something arrives again and again, for ever."""

    def answer(client: socket.socket) -> None:
        client.sendall(before)
        while True:
            client.sendall(part)
            time.sleep(pause_seconds)

    return answer


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(list(words))
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    "answer",
    [
        again(OK + b"Content-Length: 100000\r\n\r\n", b" "),
        again(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        again(OK, b"X-Name: value\r\n"),
        again(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["body", "chunks", "headers", "continue"],
)
def test_an_answer_without_end_is_no_answer(capsys: pytest.CaptureFixture[str], answer: Answer) -> None:
    with answering(answer) as url:
        began = time.monotonic()
        code, out, err = run(capsys, "ping", "--url", url, "--timeout", str(TIMEOUT_SECONDS))
        assert time.monotonic() - began < TIMEOUT_SECONDS + STALL_SECONDS
    assert (code, out) == (1, "")
    assert err == f"lmcache: {url} did not answer GET /healthcheck within {TIMEOUT_SECONDS:g} s.\n"


WRONG: dict[str, Any] = dict.fromkeys(
    ("instances", "l1", "l2", "version", "quotas", "enforced", "chunks", "objects", "bytes", "protocol_version"), "x"
)


@pytest.mark.parametrize(
    "command",
    [
        ("describe",),
        ("query", "--tokens", "1"),
        ("query", "--tokens", "1", "--model", "m"),
        ("top", "--once", "--interval", "0.2"),
        ("quota", "list"),
        ("quota", "get", "a"),
        ("kvcache", "clear"),
    ],
)
@pytest.mark.parametrize("body", [b"<html>", [1, 2], 5, None, WRONG, b"[" * 200_000], ids=lambda body: str(body)[:8])
def test_answers_of_other_types_are_one_sentence(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...], body: Any
) -> None:
    with answering(whole(body)) as url:
        code, out, err = run(capsys, *command, "--url", url)
    assert (code, out, err) == (1, "", f"lmcache: {url} does not answer as a cache server does.\n")


def test_the_doctor_goes_on_beside_a_server_of_another_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(whole(WRONG)) as url:
        code, out, _ = run(capsys, "doctor", "--skip-import", "--format", "json", "--url", url)
    checks = {check["name"]: check for check in json.loads(out)["metrics"]["checks"]}
    assert code == 1 and "open files" in checks
    assert checks[f"server {url}"]["found"] == f"{url} does not answer as a cache server does."


def test_names_give_no_orders_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    quota = {"cache_salt": ORDER, "limit_gb": 1.0, "current_usage_gb": 0.5, "exists": True}
    with answering(whole({"quotas": [quota], "enforced": True})) as url:
        code, shown, _ = run(capsys, "quota", "list", "--url", url)
        assert code == 0
        assert "?]0;mine??[2Jsalt?line" in shown and "\x1b" not in shown
        code, told, _ = run(capsys, "quota", "list", "--url", url, "--format", "json")
        assert json.loads(told)["metrics"]["quotas"] == [quota] and "\x1b" not in told
    with answering(whole({"error": ORDER}, 503)) as url:
        code, _, err = run(capsys, "quota", "list", "--url", url)
        assert code == 1 and "\x1b" not in err and err.count("\n") == 1
    with answering(whole({"data": [{"id": "\ud800\x1b[1m", "max_model_len": 5}]})) as url:
        code, shown, _ = run(capsys, "describe", "engine", "--url", url)
        assert code == 0 and "??[1m, up to 5 tokens" in shown


def test_json_has_no_numbers_that_json_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    with answering(whole(b"vllm:kv_cache_usage_perc NaN\nvllm:num_requests_running +Inf\n")) as url:
        code, out, _ = run(capsys, "describe", "engine", "--url", url, "--format", "json")
    found = json.loads(out, parse_constant=refuse)["metrics"]
    assert (code, found["kv_cache_usage"], found["num_requests_running"]) == (0, None, None)


def test_a_token_that_no_header_can_carry_is_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(whole({"status": "healthy"})) as url:
        for token in ("secret\nsecret", "secr\u20act"):
            monkeypatch.setenv("LMCACHE_ADMIN_TOKEN", token)
            code, _, err = run(capsys, "ping", "--url", url)
            assert (code, err) == (2, "lmcache: What LMCACHE_ADMIN_TOKEN has must be one line of ASCII.\n")
        monkeypatch.setenv("LMCACHE_ADMIN_TOKEN", "0123456789abcdef\n")  # as files end
        assert run(capsys, "ping", "--url", url)[0] == 0


def test_the_bench_takes_no_answer_without_end(capsys: pytest.CaptureFixture[str]) -> None:
    def endless(client: socket.socket) -> None:
        client.sendall(OK + b"Transfer-Encoding: chunked\r\n\r\nffffffffffff\r\n")
        while True:
            client.sendall(bytes(1 << 20))

    with answering(endless) as url:
        code, _, err = run(capsys, "bench", "engine", "--url", url)
        assert code == 1 and "the answer is too large" in err


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("pause_seconds", [0.1, 0.0])
def test_the_bench_waits_for_its_first_answer_no_longer_than_it_may(
    capsys: pytest.CaptureFixture[str], named: bool, pause_seconds: float
) -> None:
    """Also where something comes in the moment in which it gives up."""
    with answering(again(OK + b"\r\n", b'data: {"choices": []}\n\n', pause_seconds)) as url:
        model = ["--model", "m"] * named
        code, _, err = run(capsys, "bench", "engine", "--url", url, *model, "--max-seconds", "0.5")
    assert code == 1 and "its answer took longer than --max-seconds 0.5" in err


@pytest.mark.parametrize(
    "words", [("--l1-sise-gb", "5"), ("here",), ("--http-port",), ("--l1-sise-gb=5", "--url", "x")]
)
def test_a_mistyped_option_of_the_doctor_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    code, out, err = run(capsys, "doctor", "--skip-import", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words[0].partition("=")[0] in err
