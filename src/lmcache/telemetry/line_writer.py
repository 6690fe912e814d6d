"""Log lines on their way out: whoever logs never waits for a busy disk, a full pipe or a terminal that stands still."""

from __future__ import annotations

import contextlib
import os
import select

from lmcache.core.limits import MAX_LOG_LINES_WAITING
from lmcache.telemetry.batch_queue import BatchQueue


class LineWriter:
    """The stream of a log handler. A thread writes the lines to the file; beyond `max_lines` that wait, lines are
    dropped, and a line says how many."""

    def __init__(self, fd: int, *, max_lines: int = MAX_LOG_LINES_WAITING) -> None:
        self._fd = fd
        self._lines: BatchQueue[str] = BatchQueue(self._write, max_lines, "log", logs_faults=False)
        self._lines.start()

    def __len__(self) -> int:
        """How many lines wait."""
        return len(self._lines)

    def write(self, text: str) -> int:
        self._lines.put(text)
        return len(text)

    def flush(self) -> None:
        """Does nothing: lines go out by themselves, and a handler calls this after each."""

    def drain(self, seconds: float) -> bool:
        """Waits until all that was written before is out; whether it is."""
        return self._lines.drain(seconds)

    def _write(self, lines: list[str], dropped: int) -> None:
        if dropped:
            lines.append(f"LMCache WARNING: {dropped} log lines were lost: they were not read in time\n")
        rest = "".join(lines).encode(errors="backslashreplace")
        # Not by sys.stderr: a thread that hangs inside it would abort the interpreter when the process ends.
        with contextlib.suppress(OSError):  # nobody is there to read it
            while rest:
                try:
                    rest = rest[os.write(self._fd, rest) :]
                except BlockingIOError:
                    select.select([], [self._fd], [])
