"""A cache server that belongs to the engines which use it: the first one starts it, the last one that leaves ends it.

Every process here holds a shared lock on one file while it uses the server. `server_guardian` is the parent of the
server; it waits for the exclusive lock and then ends the server. So whatever dies, however it dies, the kernel tells
the others. A server that somebody else started has no guardian here, and is used and never ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import subprocess
import sys

from lmcache.client.client import Client
from lmcache.client.engine_environment import ENGINE_SYSTEM, EngineEnvironment
from lmcache.core.address import socket_path
from lmcache.device.affinity import engine_cpus, unpinned
from lmcache.errors import ResourceError, ServerUnavailable
from lmcache.integration.engine import server_guardian
from lmcache.integration.engine.run_folder import run_folder
from lmcache.integration.engine.server_guardian import BUSY, FAILED, KEEP, STARTED
from lmcache.integration.engine.server_order import ServerOrder
from lmcache.memory import ownership

log = logging.getLogger("lmcache.engine")

_GUARDIAN_OWNER = 0  # its byte of the lock file; owners of L1 count from 1
_PROBE_SECONDS = 2.0  # that a server which accepts connections has for its first answer
_SILENT_SECONDS = 10.0  # that one of somebody else may take until it serves
_LOOK_SECONDS = 0.02
_STARTER_SECONDS = 5.0  # that the starting process may outlive its report
_REPORT_BYTES = 8192

_entered: dict[str, OwnedServer] = {}  # of this process, by URL


class OwnedServer:
    """This process as a user of the server at `order.url`. For one thread at a time."""

    @classmethod
    def enter(cls, order: ServerOrder, environment: EngineEnvironment = ENGINE_SYSTEM) -> OwnedServer:
        """Each `enter` ends with a `leave`. Two sides of an engine in one process are one user."""
        server = _entered.setdefault(order.url, cls(order, environment))
        server._sides += 1
        return server

    def __init__(self, order: ServerOrder, environment: EngineEnvironment) -> None:
        """Use `enter`."""
        self._order = order
        self._environment = environment
        self._sides = 0
        self._lock = -1  # carries the shared lock
        self._is_others = False  # somebody else started it, and no engine has asked for one
        self._starter: subprocess.Popen[bytes] | None = None  # under way
        self._report = -1  # the end of a pipe that the guardian writes to
        self._reported = b""

    # ---- start -------------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Starts the server if nothing is there, without waiting for it. ResourceError if it cannot be tried."""
        try:
            self._is_others = self._lock < 0 and not os.path.lexists(self._path(".lock")) and self._listens()
            if self._is_others:
                return  # no file is made that nobody would remove if this process is killed
            if self._join() and self._starter is None and not self._has_guardian() and not self._listens():
                self._start()
        except OSError as error:  # no file or lock is left on this machine, or to this process
            raise ResourceError(f"The files of a server cannot be used: {error.strerror}.") from error

    def wait(self, timeout_seconds: float) -> None:
        """Until a healthy server answers, started here if need be. LMCacheError with the reason if none does."""
        clock = self._environment.clock
        began = clock.monotonic()
        while True:
            self.begin()
            waited_seconds = clock.monotonic() - began
            if (self._is_others or self._lock >= 0) and self._listens():
                try:
                    self._probe()
                    return self._forget_starter()
                except ServerUnavailable as error:  # it starts, or is none of ours
                    if not self._has_guardian() and waited_seconds > _SILENT_SECONDS:
                        raise ServerUnavailable(f"What listens there does not answer: {error}") from error
            self._read_report()
            if waited_seconds > timeout_seconds:
                raise ServerUnavailable(f"It was not ready within {timeout_seconds:g} s; {self.log_path} says more.")
            clock.sleep(_LOOK_SECONDS)

    def leave(self) -> None:
        """The last side of the last engine ends the server, unless it is to stay."""
        self._sides -= 1
        if self._sides:
            return
        del _entered[self._order.url]
        self._forget_starter()
        lock, self._lock = self._lock, -1
        if lock < 0:
            return
        with contextlib.suppress(OSError):
            # No guardian removes the file where none was needed, or where the server failed.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not ownership.is_owner_locked(lock, _GUARDIAN_OWNER):
                os.unlink(self._path(".lock"))
                run_folder().rmdir()
        os.close(lock)

    @property
    def log_path(self) -> str:
        return self._path(".log")

    # ---- the lock ----------------------------------------------------------------------------------------------------
    def _join(self) -> bool:
        """False while a guardian that has no engine left ends its server."""
        if self._lock >= 0:
            return True
        path = self._path(".lock")
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # the folder was removed in this moment
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock), os.stat(path)):
                raise FileNotFoundError
            if self._order.keep:
                os.pwrite(lock, KEEP, 0)
        except (BlockingIOError, FileNotFoundError):
            os.close(lock)
            return False
        except OSError:
            os.close(lock)
            raise
        self._lock = lock
        return True

    def _has_guardian(self) -> bool:
        return self._lock >= 0 and ownership.is_owner_locked(self._lock, _GUARDIAN_OWNER)

    def forget_in_child(self) -> None:
        """A forked child uses no server: the lock ends with its parent."""
        for fd in (self._lock, self._report):
            if fd >= 0:
                os.close(fd)
        self._lock = self._report = -1

    # ---- the guardian ------------------------------------------------------------------------------------------------
    def _start(self) -> None:
        order = self._order
        message = {
            "lock": self._path(".lock"),
            "log": self.log_path,
            "command": [sys.executable, "-m", "lmcache.cli.main", "server", *order.options],
            # The folder that the engine was started in must not decide what is imported.
            "environment": {**order.environment, "PYTHONSAFEPATH": "1"},
            "leftovers": order.leftovers,
            "stop_seconds": order.stop_seconds,
        }
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            with unpinned(engine_cpus()):  # threads of an engine are pinned, and children inherit that
                starter = subprocess.Popen(
                    [sys.executable, "-I", "-S", server_guardian.__file__],
                    stdin=subprocess.PIPE,
                    stdout=writing,
                    stderr=subprocess.DEVNULL,
                    env=dict(order.environment),
                    start_new_session=True,
                )
            assert starter.stdin is not None
            with starter.stdin as stdin:
                stdin.write(json.dumps(message).encode())
        except OSError as error:
            os.close(reading)
            raise ResourceError(f"No process could be started: {error.strerror}.") from error
        finally:
            os.close(writing)
        os.set_blocking(reading, False)
        self._starter, self._report, self._reported = starter, reading, b""
        log.info("Starting an LMCache server at %s; its log is %s", order.url, self.log_path)

    def _read_report(self) -> None:
        """ResourceError, with what the server said last, when it could not be started."""
        if self._report < 0:
            return
        try:
            while data := os.read(self._report, _REPORT_BYTES):
                self._reported += data
        except BlockingIOError:
            return
        word, _, reason = self._reported.decode(errors="replace").strip().partition(" ")
        self._forget_starter()
        if word == FAILED:
            raise ResourceError(reason)
        if word not in (BUSY, STARTED):
            raise ResourceError("The process that starts it was killed.")

    def _forget_starter(self) -> None:
        if self._report >= 0:
            os.close(self._report)
            self._report = -1
        starter, self._starter = self._starter, None
        if starter is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it has only to leave its child to itself
                starter.wait(_STARTER_SECONDS)

    # ---- the server --------------------------------------------------------------------------------------------------
    def _listens(self) -> bool:
        path = socket_path(self._order.url)
        try:
            if path:
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.settimeout(_PROBE_SECONDS)
                    connection.connect(path)
            else:
                host, _, port = self._order.url.partition("://")[2].rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()
        except OSError:
            return False
        return True

    def _probe(self) -> None:
        """ServerUnavailable while it does not answer; another LMCacheError for a server that cannot be used."""
        order = self._order
        client = Client(order.url, environment=self._environment, map_memory=False, curve=order.curve, quiet_start=True)
        try:
            client.connect(_PROBE_SECONDS)
        finally:
            client.close()

    def _path(self, suffix: str) -> str:
        return str(run_folder() / (self._order.name + suffix))


def _forget_in_child() -> None:
    for server in _entered.values():
        server.forget_in_child()
    _entered.clear()


os.register_at_fork(after_in_child=_forget_in_child)
