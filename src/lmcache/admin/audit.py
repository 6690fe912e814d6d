"""The audit log: one line of JSON for each change that somebody asked for, and for each that was refused."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from lmcache.clock import Clock
from lmcache.core.folders import refuse_files
from lmcache.core.limits import (
    MAX_AUDIT_LINES_WAITING,
    MAX_AUDIT_REFUSALS_AT_ONCE,
    MAX_AUDIT_REFUSED_CHARACTERS,
    MAX_AUDIT_TEXT_CHARACTERS,
)
from lmcache.errors import ResourceError
from lmcache.telemetry.batch_queue import BatchQueue

log = logging.getLogger("lmcache.audit")

_STOP_SECONDS = 2.0
_REFUSALS_PER_SECOND = 1.0
_MODE = 0o600
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def refuse_unusable(path: str) -> None:
    """ResourceError where `AuditLog(path)` would raise it. Does not make the file."""
    if path:
        try:
            os.close(os.open(path, _FLAGS & ~os.O_CREAT))
        except FileNotFoundError as missing:
            folder = os.path.dirname(os.path.abspath(path))
            if not os.path.isdir(folder) or os.path.islink(path):
                raise _unusable(path, missing) from None
            if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
                raise _unusable(path, OSError(errno.EACCES, os.strerror(errno.EACCES))) from None
            try:
                refuse_files(folder)
            except OSError as error:
                raise _unusable(path, error) from None
        except OSError as error:
            raise _unusable(path, error) from None


class AuditLog:
    """Appends to a file; with an empty path it records nothing. Thread-safe, and no caller waits for the disk.

    A file that was renamed or removed, as logrotate does, is made anew. Lines that cannot be written are lost, and the
    log of the server says so, with each of them at level ERROR.
    """

    def __init__(self, path: str, clock: Clock) -> None:
        """ResourceError when the file cannot be made or opened."""
        self._path = path
        self._clock = clock
        self._fd = _open(path) if path else -1
        self._broken_line = False  # the file ends in a part of a line
        self._failing = False
        self._refusing = threading.Lock()
        self._refusals_left = float(MAX_AUDIT_REFUSALS_AT_ONCE)
        self._refused_at = clock.monotonic()
        self._refusals_left_out = 0
        self._lines: BatchQueue[bytes] = BatchQueue(self._write, MAX_AUDIT_LINES_WAITING, "audit")
        if path:
            self._lines.start()

    def audit(self, action: str, caller: str, detail: Mapping[str, Any], outcome: str) -> None:
        """`action`: what was asked for, such as `cache.clear`. `caller`: address and the name of a token or key, never
        the token itself. `detail`: JSON values, no secrets. `outcome`: `ok`, or why not, in one sentence."""
        self._put(action, caller, detail, outcome, MAX_AUDIT_TEXT_CHARACTERS)

    def audit_refused(self, action: str, caller: str, detail: Mapping[str, Any], outcome: str) -> None:
        """The same for somebody who may not ask, and who can ask as often as the network lets him: neither the disk nor
        the log of the server is filled. The action `refused` counts those that got no line of their own."""
        with self._refusing:
            asked_at = self._clock.monotonic()
            gained = (asked_at - self._refused_at) * _REFUSALS_PER_SECOND
            self._refusals_left = min(float(MAX_AUDIT_REFUSALS_AT_ONCE), self._refusals_left + gained)
            self._refused_at = asked_at
            if self._refusals_left < 1:
                self._refusals_left_out += 1
                return
            self._refusals_left -= 1
            left_out, self._refusals_left_out = self._refusals_left_out, 0
        self._tell_left_out(left_out)
        self._put(action, caller, detail, outcome, MAX_AUDIT_REFUSED_CHARACTERS)

    def _tell_left_out(self, left_out: int) -> None:
        if left_out:
            self.audit("refused", "", {"requests": left_out}, "they came too fast for a line each")

    def _put(self, action: str, caller: str, detail: Mapping[str, Any], outcome: str, most_characters: int) -> None:
        if self._path and not self._lines.put(self._line(action, caller, detail, outcome, most_characters)):
            log.error("The audit log is behind its disk and has no line of: %s by %s: %s", action, caller, outcome)

    def drain(self, seconds: float) -> bool:
        """Waits until all that was recorded before is in the file; whether it is."""
        return self._lines.drain(seconds)

    def close(self) -> None:
        """Writes what waits. Idempotent."""
        left_out, self._refusals_left_out = self._refusals_left_out, 0
        self._tell_left_out(left_out)
        self._lines.stop(_STOP_SECONDS)

    def _line(self, action: str, caller: str, detail: Mapping[str, Any], outcome: str, most_characters: int) -> bytes:
        moment = datetime.fromtimestamp(self._clock.wall(), timezone.utc).isoformat(timespec="milliseconds")
        shown: Any = dict(detail)
        text = json.dumps(shown, default=str)
        if len(text) > most_characters:
            shown = {"truncated": text[:most_characters]}
        record = {
            "time": moment.replace("+00:00", "Z"),
            "caller": caller[:most_characters],
            "action": action,
            "detail": shown,
            "outcome": outcome[:most_characters],
        }
        return json.dumps(record, default=str).encode() + b"\n"

    # ---- the queue's thread ------------------------------------------------------------------------------------------
    def _write(self, lines: list[bytes], dropped: int) -> None:
        try:
            self._reopen_if_moved()
            for index, line in enumerate(lines):
                self._append(line)
                lines[index] = b""
        except OSError as error:
            if not self._failing:
                self._failing = True
                log.error("The audit log %s cannot be written: %s", self._path, error.strerror)
            for line in filter(None, lines):
                log.error("Not in the audit log: %s", line.decode().rstrip())
            return
        if self._failing:
            self._failing = False
            log.warning("The audit log %s can be written again", self._path)

    def _append(self, line: bytes) -> None:
        """In one write, so that lines of several servers in one file stay whole."""
        rest = b"\n" + line if self._broken_line else line
        written = 0
        try:
            while written < len(rest):
                written += os.write(self._fd, rest[written:])
        finally:
            if 0 < written < len(rest):
                self._broken_line = True
        self._broken_line = False

    def _reopen_if_moved(self) -> None:
        opened = os.fstat(self._fd)
        try:
            at_path = os.stat(self._path, follow_symlinks=False)
            if (opened.st_dev, opened.st_ino) == (at_path.st_dev, at_path.st_ino):
                return
        except FileNotFoundError:
            pass
        fd = os.open(self._path, _FLAGS, _MODE)
        os.close(self._fd)
        self._fd, self._broken_line = fd, False


def _open(path: str) -> int:
    try:
        return os.open(path, _FLAGS, _MODE)
    except OSError as error:
        raise _unusable(path, error) from None


def _unusable(path: str, error: OSError) -> ResourceError:
    return ResourceError(f"--audit-log {path} cannot be written: {error.strerror}; choose another file or none.")
