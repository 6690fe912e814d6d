"""Runs the cache server of the engines that asked for one, and ends it when the last of them has gone.

Run as a program, without the package, detached from the engine that started it. Each engine holds a shared lock on one
file for as long as it lives, which the kernel drops however the engine dies. This process waits for the exclusive lock:
once it has that, no engine is left, and while it has it, none can join. A second lock, on one byte of the same file,
says that a guardian is there. A server that dies while engines live is started again, and what it left is removed.
After a server that failed or was told to end this process stays as long as engines do, without the second lock, for the
lock file to go with the last of them.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from typing import Any

KEEP = b"keep"  # content of the lock file: the server stays when the last engine has gone
READY = b" is ready: engines at "  # in the line that a server prints then
BUSY, STARTED, FAILED = "busy", "started", "failed"  # reported: another guardian is there; it is ready; "failed WHY"
GUARDIAN_OFFSET = 1 << 62  # of the byte that it locks: that of owner 0 in memory/ownership.py

_PR_SET_PDEATHSIG = 1
_FLOCK = struct.Struct("@hhqqi0q")  # l_type, l_whence, l_start, l_len, l_pid
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
_HEALTHY_SECONDS = 60.0  # that a server was ready before its death counts as the first one
_READ_BYTES = 64 * 1024
_TAIL_BYTES = 4096  # of the server's output, for who asks why it did not start
_MAX_LOG_BYTES = 4 << 20  # the file of the log is replaced beyond, once
_OLD_LOG_SECONDS = 7 * 86400.0  # that the log of a failed server is kept at least
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class RestartPause:
    """Doubles from death to death of servers that are not ready for long."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def after(self, ready_seconds: float) -> float:
        """Seconds to wait after a server that was ready for so long."""
        longer = min(2 * self._seconds, _LONGEST_PAUSE_SECONDS)
        self._seconds = longer if longer and ready_seconds < _HEALTHY_SECONDS else _FIRST_PAUSE_SECONDS
        return self._seconds


def pause(wakeup: int, left: int, seconds: float) -> bool:
    """False at once when a signal to end comes in at `wakeup`, or something at `left`; other signals end no pause."""
    end = time.monotonic() + seconds
    while True:
        ready = select.select([wakeup, left], [], [], max(0.0, end - time.monotonic()))[0]
        if left in ready or (wakeup in ready and _is_told(wakeup)):
            return False
        if not ready:
            return True


def _is_told(wakeup: int) -> bool:
    return bool(set(os.read(wakeup, 64)) & set(_SIGNALS))


class Guardian:
    """`order`: `lock`, `log` (paths), `command` (of the server), `environment`, `leftovers` (paths that a killed server
    leaves; shared memory only where no live process has locked it), `stop_seconds` (when it is killed)."""

    def __init__(self, order: "dict[str, Any]") -> None:
        self._order = order
        self._lock = os.open(order["lock"], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._wakeup, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in (*_SIGNALS, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        self._left, self._left_writing = os.pipe2(os.O_CLOEXEC)
        self._output = -1
        self._log = -1
        self._tail = b""
        self._is_ready = self._was_ready = False
        self._ready_at = 0.0
        self._is_told = False  # to end, by a signal
        self._is_reported = False
        self._has_lock = False  # the exclusive one: no engine is left
        self._is_over = False  # there is no server any more, and will be none

    def run(self) -> None:
        try:
            fcntl.fcntl(self._lock, fcntl.F_OFD_SETLK, _guardian_lock(fcntl.F_WRLCK))
        except BlockingIOError:
            self._report(BUSY)
            return
        threading.Thread(target=self._await_engines, daemon=True).start()
        restart_pause = RestartPause()
        while True:
            server = self._start_server()
            status = self._watch(server)
            ready_seconds = time.monotonic() - self._ready_at if self._is_ready else 0.0
            if status:
                self._remove_leftovers()
            clean = status == 0 or self._is_told
            if clean or self._has_lock or not self._was_ready:
                break
            if not pause(self._wakeup, self._left, restart_pause.after(ready_seconds)):
                clean = True
                break
        self._end(clean=clean)

    # ---- the engines -------------------------------------------------------------------------------------------------
    def _await_engines(self) -> None:
        """On a thread of its own: the lock is waited for without a deadline, as engines run for any time."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        if self._is_over:
            return
        if os.pread(self._lock, len(KEEP), 0) == KEEP:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        else:
            self._has_lock = True
            os.write(self._left_writing, b"x")

    def _report(self, line: str) -> None:
        """To the engine that started this process, once; it may have gone."""
        if not self._is_reported:
            self._is_reported = True
            with contextlib.suppress(OSError):
                os.write(1, line.encode() + b"\n")
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.close(nowhere)

    # ---- the server --------------------------------------------------------------------------------------------------
    def _start_server(self) -> int:
        """Its process id."""
        self._is_ready, self._tail = False, b""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._log = os.open(self._order["log"], flags, 0o600) if self._log < 0 else self._log
        self._output, writing = os.pipe2(os.O_CLOEXEC)
        guardian = os.getpid()
        server = os.fork()
        if not server:
            _become(self._order, writing, guardian)
        os.close(writing)
        os.set_blocking(self._output, False)
        return server

    def _watch(self, server: int) -> int:
        """Until the server has ended: its status as `os.waitpid` gives it."""
        kill_at = None
        while True:
            waited = None if kill_at is None else max(0.0, kill_at - time.monotonic())
            watched = [self._wakeup] + [self._output] * (self._output >= 0) + [self._left] * (kill_at is None)
            ready = select.select(watched, [], [], waited)[0]
            if self._output in ready:
                self._read_output()
            self._is_told |= self._wakeup in ready and _is_told(self._wakeup)
            if kill_at is None and (self._is_told or self._left in ready):
                kill_at = time.monotonic() + self._order["stop_seconds"]
                os.kill(server, signal.SIGTERM)
            elif kill_at is not None and time.monotonic() >= kill_at:
                kill_at = time.monotonic() + self._order["stop_seconds"]
                os.kill(server, signal.SIGKILL)
            pid, status = os.waitpid(server, os.WNOHANG)
            if pid:
                self._read_output()
                if self._output >= 0:
                    os.close(self._output)
                    self._output = -1
                return status

    def _read_output(self) -> None:
        while self._output >= 0:
            try:
                data = os.read(self._output, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                os.close(self._output)
                self._output = -1
                return
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
            self._write_log(data)
            if not self._is_ready and READY in self._tail:
                self._is_ready = self._was_ready = True
                self._ready_at = time.monotonic()
                self._report(STARTED)

    def _write_log(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk costs lines of a log
            if os.fstat(self._log).st_size + len(data) > _MAX_LOG_BYTES:
                os.replace(self._order["log"], self._order["log"] + ".old")
                os.close(self._log)
                self._log = os.open(self._order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.write(self._log, data)

    def _remove_leftovers(self) -> None:
        for path in self._order["leftovers"]:
            with contextlib.suppress(OSError):
                (_remove_unlocked if os.path.isfile(path) else _remove_unheard)(path)

    # ---- the end -----------------------------------------------------------------------------------------------------
    def _end(self, *, clean: bool) -> None:
        """Leaves nothing; the log stays only where it says why the server failed."""
        failed = not clean and not self._has_lock
        if failed:
            remove_old_logs(os.path.dirname(self._order["log"]), time.time())
            self._report(f"{FAILED} {_last_line(self._tail)}")
        else:
            self._report(f"{FAILED} The server was told to end.")
            for path in (self._order["log"], self._order["log"] + ".old"):
                with contextlib.suppress(OSError):
                    os.unlink(path)
        with contextlib.suppress(OSError):
            if not self._has_lock:
                self._outlive_engines()
            if os.path.samestat(os.fstat(self._lock), os.stat(self._order["lock"])):
                os.unlink(self._order["lock"])
            os.rmdir(os.path.dirname(self._order["lock"]))
        os._exit(0)  # the thread may still wait for the engines

    def _outlive_engines(self) -> None:
        """No guardian any more. BlockingIOError where another one has come meanwhile, and will remove the file."""
        self._is_over = True
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        fcntl.fcntl(self._lock, fcntl.F_OFD_SETLK, _guardian_lock(fcntl.F_UNLCK))
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fcntl.fcntl(self._lock, fcntl.F_OFD_SETLK, _guardian_lock(fcntl.F_WRLCK))


def remove_old_logs(folder: str, now: float) -> None:
    """Removes logs of servers that failed long ago: one that a single engine may reach has a new name each time."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            name, dot, kind = entry.name.rpartition(".log")
            if not dot or kind not in ("", ".old") or os.path.exists(os.path.join(folder, name + ".lock")):
                continue
            with contextlib.suppress(OSError):  # gone meanwhile, or no file: the others are removed all the same
                if entry.stat().st_mtime < now - _OLD_LOG_SECONDS:
                    os.unlink(entry.path)


def _guardian_lock(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, GUARDIAN_OFFSET, 1, 0)


def _become(order: "dict[str, Any]", output: int, guardian: int) -> None:
    """In the forked child: the server. It ends with the guardian, whose thread that forked lives as long."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != guardian:
        os._exit(1)
    for number in (*_SIGNALS, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        os.execve(order["command"][0], order["command"], order["environment"])
    except OSError as error:
        os.write(2, f"{order['command'][0]} cannot be run: {error.strerror}\n".encode())
    os._exit(127)


def _remove_unlocked(path: str) -> None:
    """BlockingIOError where a live server holds it: one that somebody started meanwhile."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            os.unlink(path)
    finally:
        os.close(fd)


def _remove_unheard(path: str) -> None:
    """Removes a socket that nobody listens at."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        if probe.connect_ex(path) == errno.ECONNREFUSED:
            os.unlink(path)


def _last_line(output: bytes) -> str:
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "It said nothing."


def main() -> None:
    order = json.loads(sys.stdin.read())
    if os.fork():  # no child of the engine: neither a zombie there, nor ended with the tree of its processes
        os._exit(0)
    Guardian(order).run()


if __name__ == "__main__":
    main()
