"""The server's end of the process that exports (otlp_process.py): messages go to it, and it answers each with what
became of it, so that nothing is lost uncounted."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import msgspec

from lmcache.core.framed_messages import framed, read_payloads

STOP_SECONDS = 2.0  # for what waits, when the server ends
_ENDED = "the process that exports has ended"

Lost = Callable[[int, str], object]  # how many spans, 0 for metrics; and why


def write_message(stream: IO[bytes], message: Mapping[str, Any]) -> None:
    _write_frame(stream, framed(message))


def _write_frame(stream: IO[bytes], frame: bytes) -> None:
    stream.write(frame)
    stream.flush()


def read_messages(stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Until the stream ends, also in the middle of a message."""
    return map(msgspec.msgpack.decode, read_payloads(stream))


class ExporterProcess:
    """Invariant: each message that `send` has taken is answered by the process, or lost; `lost` is told of it, on a
    thread of its own. One thread sends at a time."""

    def __init__(self, settings: Mapping[str, Any], lost: Lost) -> None:
        """OSError when it cannot be started."""
        command = [sys.executable, "-m", "lmcache.telemetry.otlp_process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._lost = lost
        self._lock = threading.Lock()
        self._unanswered: deque[int] = deque()  # the spans of each message; the pipe bounds them
        self._has_ended = False
        self._reading = threading.Thread(target=self._read, name="lmcache-otlp-answers", daemon=True)
        self._reading.start()
        self._write(framed(settings))

    @property
    def why_ended(self) -> str:
        """ "" while it runs."""
        code = self._process.poll()
        return "" if code is None else f"it ended with {code}"

    def send(self, message: Mapping[str, Any], spans: int) -> bool:
        """False when the process has ended, and the message is the caller's to count, as one is that raises."""
        frame = framed(message)
        with self._lock:
            if self._has_ended:
                return False
            self._unanswered.append(spans)
        self._write(frame)
        return True

    def kill(self) -> None:
        """Idempotent."""
        self._process.kill()
        self._process.wait()
        self._close_input()

    def close(self) -> None:
        """Lets it send what it has, and ends it after a moment."""
        # A pipe that is full may keep whoever closes it.
        threading.Thread(target=self._close_input, daemon=True).start()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_SECONDS)
        self._reading.join(STOP_SECONDS)

    def _write(self, frame: bytes) -> None:
        assert self._process.stdin is not None
        try:
            _write_frame(self._process.stdin, frame)
        except (OSError, ValueError):  # half a message may be in the pipe: nothing can follow it
            self._process.kill()

    def _close_input(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for answer in read_messages(answers):
                spans = self._unanswered.popleft()
                if answer["failure"]:
                    self._lost(spans, answer["failure"])
        with self._lock:
            self._has_ended = True
        for spans in self._unanswered:
            self._lost(spans, _ENDED)
