"""A small OpenAI-compatible server: it streams words, has a cache of prefixes, and fails on demand."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "small"
_BLOCK = 16  # words of a block of its cache


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # connections that wait to be accepted


class OpenAIServer:
    """`faults`: for requests from a number on, counted from 1, what goes wrong. The first request of a run is the one
    that is not measured."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.faults: dict[int, str] = {}
        self.tells_usage = True
        self.gets: list[tuple[str, str]] = []  # paths, and what proved who asked
        self.answers: dict[str, tuple[int, Any]] = {}  # status and text or JSON of other paths
        self.released = threading.Event()  # ends what stands still
        self._seen: set[tuple[str, ...]] = set()
        self._lock = threading.Lock()
        self.server = _Server(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def note(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> str:
        """The fault of this request, or ""."""
        with self._lock:
            self.paths.append(path)
            self.headers.append(headers)
            self.bodies.append(body)
            begun = [number for number in self.faults if number <= len(self.bodies)]
            return self.faults[max(begun)] if begun else ""

    def cached(self, words: list[str]) -> int:
        """Words of the longest prefix of whole blocks that was asked before."""
        found = 0
        with self._lock:
            for end in range(_BLOCK, len(words) + 1, _BLOCK):
                if tuple(words[:end]) in self._seen and found == end - _BLOCK:
                    found = end
                self._seen.add(tuple(words[:end]))
        return found


def words_of(body: dict[str, Any]) -> list[str]:
    if "messages" in body:
        return [word for message in body["messages"] for word in str(message["content"]).split()]
    prompt = body["prompt"]
    return prompt.split() if isinstance(prompt, str) else [str(number) for number in prompt]


def _handler(openai: OpenAIServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            openai.gets.append((self.path, self.headers.get("Authorization", "")))
            if self.path in openai.answers:
                self._json(*openai.answers[self.path])
            elif self.path == "/v1/models":
                self._json(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            else:
                self._json(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fault = openai.note(self.path, dict(self.headers), body)
            if fault == "silent":
                openai.released.wait(30)
                return
            if fault == "hangs up":
                self.close_connection = True
                self.connection.close()
                return
            if fault == "refused":
                self._json(400, {"error": {"message": "This model's maximum context length is 4096 tokens."}})
                return
            if fault == "old" and "stream_options" in body:
                self._json(400, {"error": {"message": "unknown field stream_options"}})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self._stream(body, fault)

        def _stream(self, body: dict[str, Any], fault: str) -> None:
            chat = "messages" in body
            if chat:
                self._event({"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]})
            for number in range(body["max_tokens"]):
                text = f" w{number}é"
                choice: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
                self._event({"choices": [{"index": 0, "finish_reason": None, **choice}]})
                if fault == "ends early":
                    self._piece(b"")
                    return
                if fault == "error":
                    self._event({"error": {"message": "out of memory", "code": 500}})
                if fault == "stalls":
                    openai.released.wait(30)
                    return
                if fault == "garbage":
                    self._piece(b"data: <html>\n\n")
                if fault == "other types":
                    self._event({"choices": [number]})
                if fault == "other usage":
                    self._event({"choices": [], "usage": {"prompt_tokens": "many"}})
            last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
            self._event({"choices": [{"index": 0, "finish_reason": "length", **last}]})
            if openai.tells_usage and "stream_options" in body:
                words = words_of(body)
                details = {"cached_tokens": openai.cached(words)}
                usage = {"prompt_tokens": len(words), "completion_tokens": body["max_tokens"]}
                self._event({"choices": [], "usage": {**usage, "prompt_tokens_details": details}})
            self._piece(b": a comment\r\n\r\ndata: [DONE]\r\n\r\n")
            self._piece(b"")

        def _event(self, event: dict[str, Any]) -> None:
            """In two pieces, as networks cut them."""
            text = b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"
            self._piece(text[:9])
            self._piece(text[9:])

        def _piece(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        def _json(self, status: int, answer: Any) -> None:
            text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def handle(self) -> None:
            try:
                super().handle()
            except (OSError, ValueError):  # the client has left, or a fault closed the connection
                pass

        def finish(self) -> None:
            try:
                super().finish()
            except (OSError, ValueError):
                pass

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def openai_server() -> Iterator[OpenAIServer]:
    openai = OpenAIServer()
    thread = threading.Thread(target=openai.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield openai
    finally:
        openai.released.set()
        openai.server.shutdown()
        thread.join()
        openai.server.server_close()
