"""Runs one script, and ends with it or with the server whatever the script has started.

Run as a program, without the package. Its stdin is a pipe that only the server holds: the end of it means that the
server has ended, however it did. The death signal of prctl would not do: it is bound to a thread of the server, and
ends no children of the script. As their subreaper this process gets those, too, whatever session they are in.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GRACE_SECONDS = 1.5  # between SIGTERM and SIGKILL
_LOOK_SECONDS = 0.02
_CANNOT_RUN = 127


def main(command: list[str]) -> int:
    """The exit code of the script, 128 and the number for one that a signal ended."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    script = os.fork()
    if not script:
        _become(command, prctl)
    status = None
    while status is None:
        ready, _, _ = select.select([0, reading], [], [])
        if 0 in ready or set(os.read(reading, 64)) - {signal.SIGCHLD}:
            break
        status = _reap().get(script)
    status = _end_all(script, status)
    return os.waitstatus_to_exitcode(status) % 256 if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _become(command: list[str], prctl: "ctypes._NamedFuncPointer") -> None:
    os.setsid()
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # this process has one thread: it ends with the process
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be run: {error.strerror}\n".encode())
    os._exit(_CANNOT_RUN)


def _reap() -> dict[int, int]:
    """Status by pid of the children that have ended."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if not pid:
            return ended
        ended[pid] = status


def _end_all(script: int, status: "int | None") -> int:
    """Ends the script and all that it has left; the script's status."""
    number, kill_at = signal.SIGTERM, time.monotonic() + _GRACE_SECONDS
    told: set[int] = set()
    while children := _children():
        if time.monotonic() >= kill_at:
            number = signal.SIGKILL
        for pid in children:
            if number == signal.SIGKILL or pid not in told:
                told.add(pid)
                for kill in (os.killpg, os.kill):  # its own group, if it leads one
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        kill(pid, number)
        time.sleep(_LOOK_SECONDS)
        status = _reap().get(script, status)
    return 0 if status is None else status


def _children() -> list[int]:
    """Those that are not reaped yet."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
