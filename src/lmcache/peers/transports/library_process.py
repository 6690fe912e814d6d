"""The server's end of a process that runs a transfer engine (`library_main`)."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from itertools import count
from typing import Any

import msgspec

from lmcache.core.framed_messages import LENGTH_BYTES, framed
from lmcache.errors import ResourceError
from lmcache.l2.background import begin_in_thread, spawn, until_done
from lmcache.peers.sockets import within
from lmcache.peers.transports.library import WHERE, LibrarySettings, Ranges, ReadEnd, ReadOrder, Ready
from lmcache.transport.forks import not_for_children

log = logging.getLogger("lmcache.peers")

START_SECONDS = 60.0  # what a process may take until it can be used, all of L1 registered
_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.25, 30.0  # before the process is started again, doubled each time
_STABLE_SECONDS = 60.0  # a process that ran so long begins with the shortest pause
# Libraries tell their standard error each connection that ends; and UCX listens where peers can be at all.
_QUIET = {"GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}
_LOOPBACK = {"UCX_NET_DEVICES": "lo"}


class LibraryProcess:
    """Belongs to one loop. It is started again whenever it has ended."""

    def __init__(self, settings: LibrarySettings, *, this_host_alone: bool) -> None:
        self.engine = settings.engine
        self._settings = settings
        self._environ = _LOOPBACK if this_host_alone else {}
        self._life: _Life | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def region(self) -> bytes:
        """How others reach the memory here; b"" while nobody can."""
        return self._life.region if self._life is not None and not self._life.is_ending else b""

    @property
    def pid(self) -> int:
        """0 before it has started."""
        return self._life.pid if self._life is not None else 0

    async def start(self) -> None:
        """Waits until it is ready, START_SECONDS at most. ResourceError where the transfer engine cannot be used."""
        self._life = await self._begin()
        self._keeper = spawn(self._keep(self._life), "peer-library")

    async def _begin(self) -> _Life:
        life = _Life(self._settings, {**_QUIET, **os.environ, **self._environ})
        try:
            await life.open()
        except BaseException:
            await life.end()
            raise
        return life

    async def _keep(self, life: _Life) -> None:
        pause_seconds = _PAUSE_SECONDS
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await asyncio.wait({life.gone})
            await life.end()
            if loop.time() - began > _STABLE_SECONDS:
                pause_seconds = _PAUSE_SECONDS
            while life.gone.done():
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, _MOST_PAUSE_SECONDS)
                try:
                    self._life = life = await self._begin()
                except (ResourceError, OSError) as error:
                    log.warning("%s", error)

    async def read(self, ranges: Ranges, until: asyncio.Future[None], seconds: float) -> str | None:
        """Reads into L1: "", or why not all of it came; None where there is no process, it was busy all the time, or it
        ended for another reason than this read. `until` or the time ends it. When it returns, also when it is
        cancelled, nothing is written any more, or the process has ended."""
        life = self._life
        if life is None or life.is_ending:
            return None
        return await life.read(ranges, until, seconds)

    async def close(self) -> None:
        """Idempotent."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._life is not None:
            await self._life.end()


class _Life:
    """One process, from its start to its end. `gone` is done when it has ended, with all that it did."""

    def __init__(self, settings: LibrarySettings, environ: Mapping[str, str]) -> None:
        """OSError or ResourceError where it cannot be started."""
        self.region = b""
        self.is_ending = False
        self._where = f"{WHERE} {settings.engine}"
        self._settings = settings
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[ReadEnd | None]] = {}  # None: the process has ended
        self._answers: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        ours, theirs = socket.socketpair()
        self._socket = not_for_children(ours)
        with theirs:
            command = [sys.executable, "-m", "lmcache.peers.transports.library_main"]
            try:
                self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=environ, start_new_session=True)
            except OSError:
                ours.close()
                raise
        self.pid = self._process.pid
        try:
            self.gone = begin_in_thread("peer-library", self._process.wait)
        except RuntimeError as error:
            ours.close()
            self._process.kill()
            self._process.wait()
            raise ResourceError(
                f"{self._where}: no thread can be started that waits for its process ({error})."
            ) from None

    async def open(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        self._write(self._settings)
        try:
            ready = msgspec.msgpack.decode(await within(START_SECONDS, _message(reader)), type=Ready)
        except asyncio.TimeoutError:
            ready = Ready(b"", f"{self._where}: its process was not ready within {START_SECONDS:.0f} s.")
        except (EOFError, OSError, msgspec.MsgspecError):
            ready = Ready(b"", f"{self._where}: its process ended before it was ready ({await self._kill()}).")
        if ready.sentence:
            raise ResourceError(ready.sentence)
        self.region = ready.region
        self._answers = spawn(self._read_answers(reader), "peer-library-answers")

    async def read(self, ranges: Ranges, until: asyncio.Future[None], seconds: float) -> str | None:
        number = next(self._numbers)
        answer: asyncio.Future[ReadEnd | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._write(ReadOrder(number, ranges, asyncio.get_running_loop().time() + seconds))
            either: set[asyncio.Future[Any]] = {answer, until}
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._waiting[number]
            end = answer.result() if answer.done() else None
            is_late = not answer.done() and not self.is_ending  # another one that is late ends it for all
            if not answer.done() or (end is not None and end.may_write):
                await self._kill()
        if end is None:
            return "it did not end in time" if is_late else None
        return None if end.was_late else end.sentence

    async def end(self) -> None:
        """Idempotent."""
        await self._kill()
        if self._answers is not None:
            await asyncio.gather(self._answers, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        self._socket.close()

    async def _kill(self) -> str:
        """How it ended. When it returns, also when it is cancelled, the process has ended."""
        self.is_ending = True
        self._process.kill()
        status = await until_done(self.gone)
        return f"exit status {status}"

    def _write(self, message: msgspec.Struct) -> None:
        assert self._writer is not None
        self._writer.write(framed(message))

    async def _read_answers(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                end = msgspec.msgpack.decode(await _message(reader), type=ReadEnd)
                if (answer := self._waiting.get(end.number)) is not None and not answer.done():
                    answer.set_result(end)
        except (EOFError, OSError, msgspec.MsgspecError):
            pass
        finally:
            was_ending = self.is_ending
            status = await self._kill()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_result(None)
            if not was_ending:
                log.warning("%s: its process ended by itself (%s); it is started again", self._where, status)


async def _message(reader: asyncio.StreamReader) -> bytes:
    """EOFError when there is none any more."""
    length = await reader.readexactly(LENGTH_BYTES)
    return await reader.readexactly(int.from_bytes(length, "little"))
