"""The signals that stop a server: SIGTERM, SIGINT (Ctrl-C) and SIGHUP (its terminal was closed).

Nothing is done in a signal handler: it would run inside whatever the main thread is doing, and must take no lock that
is held there. The interpreter writes each signal's number into a pipe, and a thread of its own acts on it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable

from lmcache.telemetry.logs import drain_logs

log = logging.getLogger("lmcache.server")

DRAIN_SECONDS = 10.0  # for what is on its way to L2, unless --drain-timeout-seconds says otherwise
CLOSE_SECONDS = 10.0  # for all else that ends
STOP_SECONDS = DRAIN_SECONDS + CLOSE_SECONDS  # from the first signal to the end of the process, whatever hangs
# An equal signal this soon after the first is the same one: some programs, GNU timeout for one, send theirs both to the
# process and to its group.
REPEAT_SECONDS = 0.5
_REPEAT_STEP_SECONDS = 0.05
EXIT_OVERDUE = 1
_LAST_LOG_SECONDS = 0.5


class StopRequested(Exception):
    """Ends a start that is under way."""


class StopSignals:
    """Takes the signals from its construction until `close`, both on the main thread.

    The first one sets `stop_requested`. A second one, or `stop_seconds` without an end, ends the process at once, with
    a line in the log that says what was lost. An equal one within `REPEAT_SECONDS` of the first counts as the first.
    """

    def __init__(self, stop_seconds: float = STOP_SECONDS) -> None:
        self.stop_requested = threading.Event()
        self._stop_seconds = stop_seconds  # what holds when the first signal comes
        self._what_is_lost: Callable[[], str] = str
        self._before_forced_end: list[Callable[[], object]] = []
        self._numbers = {signal.SIGTERM, signal.SIGINT}
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it
            self._numbers.add(signal.SIGHUP)
        self._closed = False
        self._reading, self._writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._writing, False)
        threading.Thread(target=self._watch, name="stop-signals", daemon=True).start()
        self._previous_fd = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, _ignore) for number in self._numbers}
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def close(self) -> None:
        """Leaves the signals to whoever had them before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._closed = True
        os.close(self._writing)

    def end_within(self, stop_seconds: float) -> None:
        """From now on that long after the first signal, in place of what the constructor was given."""
        self._stop_seconds = stop_seconds

    def before_forced_end(self, action: Callable[[], object]) -> None:
        """`action` runs on another thread, must end soon, and must wait for no lock without a deadline."""
        self._before_forced_end.append(action)

    def at_forced_end_tell(self, what_is_lost: Callable[[], str]) -> None:
        """`what_is_lost` gives a sentence, or "" when nothing is. It runs on another thread and may wait for ever."""
        self._what_is_lost = what_is_lost

    def checkpoint(self) -> None:
        """StopRequested once a signal has come."""
        if self.stop_requested.is_set():
            raise StopRequested

    def _watch(self) -> None:
        first = self._next(None)
        came_at = time.monotonic()
        if not self._closed:
            self.stop_requested.set()
        stop_seconds = self._stop_seconds
        again = self._repeated(first) or self._next(came_at + stop_seconds)
        if self._closed:
            os.close(self._reading)
            return
        for action in self._before_forced_end:
            with contextlib.suppress(Exception):  # the process ends in any case
                action()
        reason = (
            f"The server did not end within {stop_seconds:.0f} s of being told to; it ends now, whatever it is doing"
        )
        if again:
            reason = "A second signal ends the server at once"
        # Logged by another thread, as whatever hangs may hang inside a log handler.
        last_line = threading.Thread(target=self._log_last, args=(reason,), daemon=True)
        last_line.start()
        last_line.join(_LAST_LOG_SECONDS)
        os._exit(128 + again if again else EXIT_OVERDUE)

    def _repeated(self, first: int) -> int:
        """Another signal than `first` within `REPEAT_SECONDS`, 0 for none. When a signal came is not known where the
        process stood still, so that a wait counts as one step however long it was."""
        left_seconds = REPEAT_SECONDS
        while left_seconds > 0 and not self._closed:
            began_at = time.monotonic()
            again = self._next(began_at + _REPEAT_STEP_SECONDS)
            if again not in (0, first):
                return again
            left_seconds -= min(time.monotonic() - began_at, _REPEAT_STEP_SECONDS)
        return 0

    def _log_last(self, reason: str) -> None:
        lost = self._what_is_lost()
        log.error("%s", f"{reason}. {lost}" if lost else reason)
        drain_logs(_LAST_LOG_SECONDS)

    def _next(self, deadline: float | None) -> int:
        """The number of the next signal, 0 when none came in time or after `close`."""
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._reading], [], [], left)[0]:
                return 0
            read = os.read(self._reading, 1)
            if not read or read[0] in self._numbers:
                return read[0] if read else 0

    def _leave_to_parent(self) -> None:
        """In a forked child: the pipe is the parent's, and so are the signals of the parent."""
        if self._closed:
            return
        signal.set_wakeup_fd(-1)
        for number in self._numbers:
            signal.signal(number, signal.SIG_DFL)


def _ignore(*_: object) -> None:
    pass
