"""Forks real server processes that have everything imported already, so that a test can start and kill many of them.

Run as a script it takes JSON lines on its input: {"argv": [...], "log": path} starts a server and answers with its
process id, {"wait": pid} answers with its exit code when it has ended. When the input ends it ends with its servers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


class Nursery:
    """A process of its own: forking is for processes without threads."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, argv: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> int:
        """`lmcache` with these arguments, in this environment beside its own; its process id."""
        return self._ask({"argv": list(argv), "log": str(log), "environment": dict(environment or {})})

    def wait(self, pid: int) -> int:
        """Until it has ended; its exit code, negative for a signal."""
        return self._ask({"wait": pid})

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _ask(self, message: dict[str, object]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())


def _become_server(argv: list[str], log: str, environment: Mapping[str, str]) -> int:
    """In the child: nothing of the nursery stays but what is imported."""
    from lmcache.cli.main import main

    os.environ.update(environment)
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, number)
    return main(argv)


def _serve() -> None:
    import lmcache.cli.main
    import lmcache.cli.server
    import lmcache.server  # noqa: F401

    children: set[int] = set()
    for line in sys.stdin:
        message = json.loads(line)
        if "wait" in message:
            _, status = os.waitpid(message["wait"], 0)
            children.discard(message["wait"])
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                code = _become_server(message["argv"], message["log"], message["environment"])
            finally:
                os._exit(code)
        children.add(pid)
        print(pid, flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    _serve()
