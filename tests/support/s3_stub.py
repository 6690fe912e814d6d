"""A bucket in memory whose server does what a real one cannot be made to do: answers cut short, too long, throttled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from lmcache.testing.processes import LOOPBACK

XML = '<?xml version="1.0" encoding="UTF-8"?>'


class S3Stub:
    """`fault(handler)` answers a request itself and says so, or leaves it to the bucket by False. No signature is
    checked."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.now = "2026-01-02T03:04:05.678Z"
        self.times: dict[str, str] = {}  # when objects were stored
        self.requests: list[tuple[str, str]] = []  # method, path
        self.fault: Callable[[Handler], bool] = lambda handler: False
        self._server = ThreadingHTTPServer((LOOPBACK, 0), type("Bound", (Handler,), {"stub": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://{LOOPBACK}:{self._server.server_address[1]}/bucket"

    def __enter__(self) -> S3Stub:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Handler(BaseHTTPRequestHandler):
    """Every answer ends its connection."""

    stub: S3Stub
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, body: bytes = b"", length: int | None = None, /, **headers: str) -> bool:
        """`length`: what Content-Length says, where that is not true."""
        self.send_response_only(status)
        for name, value in {"Date": self.date_time_string(), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("ETag", '"etag"')
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.close_connection = True
        return True

    def refuse(self, status: int, code: str, **headers: str) -> bool:
        return self.answer(status, f"{XML}<Error><Code>{code}</Code></Error>".encode(), **headers)

    @property
    def name(self) -> str:
        """Of the object, "" for the bucket."""
        return unquote(urlsplit(self.path).path.removeprefix("/bucket").removeprefix("/"))

    @property
    def query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}

    def handle_one(self) -> None:
        self.received = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.stub.requests.append((self.command, self.path))
        if not self.stub.fault(self):
            getattr(self, f"serve_{self.command.lower()}")()

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = handle_one

    def serve_get(self) -> None:
        if "list-type" in self.query:
            prefix, after = self.query.get("prefix", ""), self.query.get("continuation-token", "")
            names = sorted(name for name in self.stub.objects if name.startswith(prefix) and name > after)
            self.list(names, int(self.query["max-keys"]))
            return
        found = self.stub.objects.get(self.name)
        if found is None:
            self.refuse(404, "NoSuchKey")
            return
        last = min(int(self.headers["Range"].rpartition("-")[2]), len(found) - 1)
        self.answer(206, found[: last + 1], Content_Range=f"bytes 0-{last}/{len(found)}")

    def list(self, names: list[str], most: int) -> None:
        """A name is the token of the page behind it."""
        more = "<IsTruncated>false</IsTruncated>"
        if len(names) > most:
            del names[most:]
            more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{names[-1]}</NextContinuationToken>"
        rows = "".join(
            f"<Contents><Key>{escape(name)}</Key>"
            f"<LastModified>{self.stub.times.get(name, self.stub.now)}</LastModified>"
            f"<Size>{len(self.stub.objects[name])}</Size></Contents>"
            for name in names
        )
        self.answer(200, f"{XML}<ListBucketResult>{more}{rows}</ListBucketResult>".encode())

    def serve_head(self) -> None:
        found = self.stub.objects.get(self.name)
        self.answer(404 if found is None else 200, found or b"")

    def serve_put(self) -> None:
        if self.headers.get("If-None-Match") == "*" and self.name in self.stub.objects:
            self.refuse(412, "PreconditionFailed")
            return
        self.stub.objects[self.name] = self.received
        self.stub.times[self.name] = self.stub.now
        self.answer(200)

    def serve_delete(self) -> None:
        self.stub.objects.pop(self.name, None)
        self.answer(204)

    def serve_post(self) -> None:
        for part in self.received.decode().split("<Key>")[1:]:
            self.stub.objects.pop(part.partition("</Key>")[0], None)
        self.answer(200, f"{XML}<DeleteResult></DeleteResult>".encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        pass
