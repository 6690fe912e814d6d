"""Log lines on their way out: whoever logs never waits for a busy disk, a full pipe or a terminal that stands still."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque

from lmcache.core.limits import MAX_LOG_LINES_WAITING


class LineWriter:
    """What a log handler writes to. A thread brings it to the file; beyond `max_lines` that wait, lines are counted
    and dropped."""

    def __init__(self, fd: int, *, max_lines: int = MAX_LOG_LINES_WAITING) -> None:
        self._fd = fd
        self._max_lines = max_lines
        self._lines: deque[str] = deque()
        self._lost = 0
        self._writing = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def write(self, text: str) -> int:
        with self._changed:
            if len(self._lines) < self._max_lines:
                self._lines.append(text)
                self._changed.notify_all()
            else:
                self._lost += 1
        return len(text)

    def flush(self) -> None:
        """Lines go out by themselves: a handler calls this after each."""

    def drain(self, seconds: float) -> bool:
        """Waits until all that was written before is out; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._lines or self._writing), seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                lines = list(self._lines)
                if self._lost:
                    lines.append(f"LMCache WARNING: {self._lost} log lines were lost: they were not read in time\n")
                self._lines.clear()
                self._lost = 0
                self._writing = True
            with contextlib.suppress(OSError):  # nobody is there to be told
                self._write_out("".join(lines).encode(errors="backslashreplace"))
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _write_out(self, rest: bytes) -> None:
        # Not by sys.stderr: a thread that hangs inside it would abort the interpreter when the process ends.
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                select.select([], [self._fd], [])
