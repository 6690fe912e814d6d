"""Frames read out of the registered L1 of a peer by a transfer engine, without the peer's doing, and verified here.

What the peer evicts or overwrites meanwhile, a peer that lies about its memory, and one that was started anew make
frames that do not verify, or a read that fails: both are asked for over TCP, in what is left of the time.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from prometheus_client import Counter

from lmcache import _native
from lmcache.core import limits
from lmcache.core.frame import verify_frames
from lmcache.core.outcome import LoadOutcome
from lmcache.errors import AdapterError, ProtocolError
from lmcache.l2.call_threads import CallThreads
from lmcache.l2.circuit_breaker import CircuitBreaker
from lmcache.peers.sockets import within
from lmcache.peers.transports.contract import Fetched, Transfer
from lmcache.peers.transports.library import Ranges
from lmcache.peers.transports.library_process import LibraryProcess

log = logging.getLogger("lmcache.peers")

_SHARE = 0.5  # of a transfer's time, the rest is for TCP
_CLEARED_BYTES = 64  # of a frame's header: what did not come must not be what was there before


class OneSidedTransport:
    def __init__(
        self,
        peer: str,
        process: LibraryProcess,
        l1_address: int,
        l1_bytes: int,
        describe: Callable[[], Coroutine[Any, Any, bytes]],
        threads: CallThreads,
        breaker: CircuitBreaker,
        failures: Counter,
    ) -> None:
        """`peer` names it in logs. L1 is that of this server. `describe` asks the peer for its region. The breaker is
        of this transport alone; `failures` counts."""
        self._peer = peer
        self._process = process
        self._l1_address, self._l1_bytes = l1_address, l1_bytes
        self._describe = describe
        self._threads = threads
        self._breaker = breaker
        self._failures = failures
        self._region = b""
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def name(self) -> str:
        return self._process.engine

    async def fetch(self, transfer: Transfer) -> Fetched:
        outcomes = [LoadOutcome.FAILED] * len(transfer.keys)
        if self._closed.done() or not transfer.slots or not transfer.lease:
            return Fetched(outcomes)
        offsets = [_native.buffer_address(buffer) - self._l1_address for buffer in transfer.buffers]
        # Buffers outside of L1 are of trials, and of layers that change what comes.
        fitting = [
            index
            for index, (offset, size, buffer) in enumerate(zip(offsets, transfer.sizes, transfer.buffers, strict=True))
            if size <= buffer.nbytes and offset >= 0 and offset + size <= self._l1_bytes
        ]
        if not fitting or not self._breaker.admits():
            return Fetched(outcomes)
        part = transfer.pick(fitting, transfer.seconds * _SHARE)
        sentence = await self._read(part, [offsets[index] for index in fitting])
        if sentence is None:
            return Fetched(outcomes)
        if sentence:
            self._failed(sentence)
            return Fetched(outcomes)
        try:
            faults = await self._threads.run(partial(verify_frames, part.keys, part.buffers))
        except AdapterError as error:
            return Fetched(outcomes, error)
        for index, fault in zip(fitting, faults, strict=True):
            if not fault:
                outcomes[index] = LoadOutcome.LOADED
        if all(faults):
            self._failed("what came is none of the frames that were asked for")
        else:
            self._breaker.succeeded()
        return Fetched(outcomes)

    async def _read(self, part: Transfer, offsets: list[int]) -> str | None:
        """ "" when all of it has come, None where that was not for this peer to say. What is begun too late to end in
        time would end the process, and the reads from other peers with it."""
        if part.seconds < limits.PEER_LEAST_READ_SECONDS:
            return None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + part.seconds
        if not self._region:
            try:
                self._region = await within(min(part.seconds, limits.PEER_HELLO_SECONDS), self._describe())
            except (OSError, EOFError, ProtocolError, asyncio.TimeoutError) as error:
                return f"it does not describe its memory ({error or type(error).__name__})"
        if not self._region:
            return "its transfer engine is not ready"
        for buffer in part.buffers:
            buffer[:_CLEARED_BYTES] = bytes(_CLEARED_BYTES)
        seconds = deadline - loop.time()
        if seconds < limits.PEER_LEAST_READ_SECONDS:
            return None
        packed = (array("Q", numbers).tobytes() for numbers in (offsets, part.slots, part.sizes))
        return await self._process.read(Ranges(self._region, *packed), self._closed, seconds)

    def _failed(self, sentence: str) -> None:
        self._region = b""  # it may have another one by now
        if self._closed.done():
            return
        self._failures.inc()
        if self._breaker.failed(at_once=True):
            log.warning(
                "Frames of the peer %s come by TCP, not %s, for %.0f s: %s",
                self._peer,
                self.name,
                self._breaker.open_seconds,
                sentence,
            )

    def close(self) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
