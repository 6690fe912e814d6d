"""What a proxy between prefill and decode engines hears of stores: an HTTP server that keeps the events."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATH = "/api/v1/telemetry"


class TelemetryProxy:
    def __init__(self, status: int) -> None:
        self.events: list[dict[str, Any]] = []
        self.status = status
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}{PATH}"

    @property
    def told(self) -> list[str]:
        """Requests, in the order in which they came."""
        return [request_id for event in self.events for request_id in event["request_ids_set"]]

    def serve(self) -> None:
        self._server.serve_forever(poll_interval=0.01)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(proxy: TelemetryProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            assert self.path == PATH and self.headers["Content-Type"] == "application/json"
            proxy.events.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            text = b'{"status": "ok"}'
            self.send_response(proxy.status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@contextmanager
def telemetry_proxy(status: int = 200) -> Iterator[TelemetryProxy]:
    proxy = TelemetryProxy(status)
    thread = threading.Thread(target=proxy.serve, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.close()
        thread.join(10.0)
