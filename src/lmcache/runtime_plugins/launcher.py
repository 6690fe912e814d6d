"""Runs the scripts: one thread starts them, logs what they print, and starts those again that fail."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from lmcache.clock import Clock
from lmcache.core.limits import MAX_PLUGIN_BYTES_PER_SECOND, MAX_PLUGIN_LINE_BYTES, MAX_PLUGIN_LINES_PER_SECOND
from lmcache.runtime_plugins.scripts import Script

log = logging.getLogger("lmcache.plugins")

CONFIG_VARIABLE = "LMCACHE_RUNTIME_PLUGIN_CONFIG"
EXTRA_VARIABLE = "LMCACHE_RUNTIME_PLUGIN_EXTRA_CONFIG"
STOP_SECONDS = 3.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
_STEADY_SECONDS = 60.0  # after a run of that length the pauses begin anew
_READ_BYTES = 64 * 1024
_GUARDIAN = Path(__file__).with_name("guardian.py")


class _Output:
    """Lines of a script on their way into the log: cut where long, left out where there are too many."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._rest = b""
        self._is_cut = False  # of the present line enough was logged
        self._second, self._lines, self._left_out = 0, 0, 0

    def take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._end_line(line)
        if len(self._rest) > MAX_PLUGIN_LINE_BYTES:
            if not self._is_cut:
                self._log(self._rest[:MAX_PLUGIN_LINE_BYTES] + b" ...")
            self._rest, self._is_cut = b"", True

    def end(self) -> None:
        if self._rest:
            self._end_line(self._rest)
        self._rest = b""
        self._tell_left_out()

    def _end_line(self, line: bytes) -> None:
        if not self._is_cut:
            self._log(line if len(line) <= MAX_PLUGIN_LINE_BYTES else line[:MAX_PLUGIN_LINE_BYTES] + b" ...")
        self._is_cut = False

    def _log(self, line: bytes) -> None:
        second = int(self._clock.monotonic())
        if second != self._second:
            self._tell_left_out()
            self._second, self._lines = second, 0
        self._lines += 1
        if self._lines > MAX_PLUGIN_LINES_PER_SECOND:
            self._left_out += 1
        else:
            log.info("%s: %s", self._name, line.decode(errors="backslashreplace").rstrip())

    def _tell_left_out(self) -> None:
        if self._left_out:
            log.warning("%s: %d lines more in a second are left out", self._name, self._left_out)
            self._left_out = 0


class _Plugin:
    """One script. On the launcher's thread only."""

    def __init__(self, script: Script, clock: Clock) -> None:
        self.script = script
        self.process: subprocess.Popen[bytes] | None = None
        self.pidfd = -1
        self.due_at: float | None = clock.monotonic()  # None: runs, or is done
        self.read_at: float | None = None  # when its output is read again; None: it is, or there is none
        self._clock = clock
        self._began_at = 0.0
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._output = _Output(script.name, clock)
        self._budget_at, self._read_bytes = 0.0, 0  # the second that is counted, and what was read in it

    def start(self, environment: Mapping[str, str]) -> None:
        self.due_at = None
        self._began_at = self._clock.monotonic()
        command = [sys.executable, "-I", "-S", str(_GUARDIAN), *self.script.command]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C is for the server, which ends it in order
        )
        self.pidfd = os.pidfd_open(self.process.pid)
        os.set_blocking(self.stdout.fileno(), False)
        log.info("%s: started as process %d", self.script.name, self.process.pid)

    @property
    def stdout(self) -> IO[bytes]:
        assert self.process is not None and self.process.stdout is not None
        return self.process.stdout

    def read(self) -> bool:
        """Logs what is there; False at the end of the output."""
        try:
            data = os.read(self.stdout.fileno(), _READ_BYTES)
        except BlockingIOError:
            return True
        self._output.take(data)
        now_seconds = self._clock.monotonic()
        if now_seconds - self._budget_at >= 1.0:
            self._budget_at, self._read_bytes = now_seconds, 0
        self._read_bytes += len(data)
        if self._read_bytes >= MAX_PLUGIN_BYTES_PER_SECOND:
            self.read_at = self._budget_at + 1.0  # a flood must not take the processor from the server
        return bool(data)

    def ended(self, *, stopping: bool) -> None:
        """It has exited. A script that ends with 0 is done."""
        assert self.process is not None
        code = self.process.wait()
        self.read()
        self.read_at = None
        self._output.end()
        self._release()
        if stopping or code == 0:
            log.info("%s: ended", self.script.name)
            return
        now_seconds = self._clock.monotonic()
        if now_seconds - self._began_at >= _STEADY_SECONDS:
            self._pause_seconds = _FIRST_PAUSE_SECONDS
        self.due_at = now_seconds + self._pause_seconds
        log.warning("%s: ended with exit code %d; again in %.0f s", self.script.name, code, self._pause_seconds)
        self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)

    def failed(self, error: OSError) -> None:
        log.error("%s: cannot be started (%s); again in %.0f s", self.script.name, error, _LONGEST_PAUSE_SECONDS)
        self.due_at = self._clock.monotonic() + _LONGEST_PAUSE_SECONDS

    def tell_to_end(self) -> None:
        """The guardian ends the script and all that it has started."""
        self.due_at = None
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()

    def _release(self) -> None:
        assert self.process is not None
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        os.close(self.pidfd)
        self.process, self.pidfd = None, -1


class PluginLauncher:
    """`start` when the server answers, `stop` when it is to end. The scripts also end when the process does."""

    def __init__(self, scripts: Sequence[Script], environment: Callable[[], Mapping[str, str]], clock: Clock) -> None:
        """`environment`: of the scripts, asked for at `start`."""
        self._plugins = [_Plugin(script, clock) for script in scripts]
        self._environment = environment
        self._clock = clock
        self._stop_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="lmcache-plugins", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends them all, and gives up after STOP_SECONDS: their guardians go on with it. Idempotent."""
        if self._thread.is_alive():
            self._stop_at = self._clock.monotonic() + STOP_SECONDS
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        environment = dict(self._environment())
        told = False
        try:
            while True:
                if self._stop_at is not None:
                    if not told:
                        told = True
                        for plugin in self._plugins:
                            plugin.tell_to_end()
                    if not any(plugin.process for plugin in self._plugins) or self._clock.monotonic() > self._stop_at:
                        return
                self._start_due(environment)
                self._read_due()
                for key, _ in self._selector.select(self._wait_seconds()):
                    self._handle(key)
        except Exception:  # root of a thread
            log.exception("Runtime plugins are not looked after any more")

    def _start_due(self, environment: Mapping[str, str]) -> None:
        now_seconds = self._clock.monotonic()
        for plugin in self._plugins:
            if plugin.due_at is not None and plugin.due_at <= now_seconds:
                try:
                    plugin.start(environment)
                except OSError as error:
                    plugin.failed(error)
                    continue
                self._selector.register(plugin.stdout, selectors.EVENT_READ, plugin)
                self._selector.register(plugin.pidfd, selectors.EVENT_READ, plugin)

    def _read_due(self) -> None:
        now_seconds = self._clock.monotonic()
        for plugin in self._plugins:
            if plugin.read_at is not None and plugin.read_at <= now_seconds:
                plugin.read_at = None
                self._selector.register(plugin.stdout, selectors.EVENT_READ, plugin)

    def _read(self, plugin: _Plugin) -> None:
        if not plugin.read() or plugin.read_at is not None:
            self._selector.unregister(plugin.stdout)

    def _wait_seconds(self) -> float | None:
        times = [at for plugin in self._plugins for at in (plugin.due_at, plugin.read_at)]
        due = [at for at in times if at is not None]
        if self._stop_at is not None:
            due.append(self._stop_at)
        return max(0.0, min(due) - self._clock.monotonic()) if due else None

    def _handle(self, key: selectors.SelectorKey) -> None:
        plugin: _Plugin | None = key.data
        if plugin is None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        elif plugin.process is not None and key.fd == plugin.pidfd:
            for fd in (plugin.pidfd, plugin.stdout.fileno()):
                with contextlib.suppress(KeyError):
                    self._selector.unregister(fd)
            plugin.ended(stopping=self._stop_at is not None)
        elif plugin.process is not None and key.fd == plugin.stdout.fileno():
            self._read(plugin)
