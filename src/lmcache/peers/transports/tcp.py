"""Frames over TCP connections of their own, received straight into the buffers by native code."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from functools import partial
from itertools import count

from lmcache import _native
from lmcache.core import limits
from lmcache.core.key_batch import pack_keys
from lmcache.core.limits import FRAME_ALIGN_BYTES, FRAME_HEADER_BYTES
from lmcache.core.outcome import LoadOutcome
from lmcache.errors import AdapterError, ProtocolError
from lmcache.l2.call_threads import CallThreads
from lmcache.l2.completions import ranges
from lmcache.peers.connections import ReadConnections
from lmcache.peers.protocol import Frames, Kind, Read
from lmcache.peers.sockets import PeerSocket, within
from lmcache.peers.transports.contract import Fetched, Transfer, words


class TcpTransport:
    name = "tcp"

    def __init__(self, connections: ReadConnections, threads: CallThreads) -> None:
        self._connections = connections
        self._threads = threads
        self._numbers = count(1)

    async def fetch(self, transfer: Transfer) -> Fetched:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + transfer.seconds
        outcomes = [LoadOutcome.FAILED] * len(transfer.keys)
        sock: PeerSocket | None = None
        fault: BaseException | None = None
        try:
            sock = await within(transfer.seconds, self._connections.take())
            sizes = await within(deadline - loop.time(), self._ask(sock, transfer))
            fault = await self._receive(sock, transfer, sizes, outcomes, deadline - loop.time())
        except (OSError, EOFError, ProtocolError, AdapterError, asyncio.TimeoutError) as error:
            fault = error
        except BaseException as error:
            fault = error
            raise
        finally:
            if sock is not None:
                (self._connections.give_back if fault is None else self._connections.drop)(sock)
        return Fetched(outcomes, fault)

    async def _ask(self, sock: PeerSocket, transfer: Transfer) -> Sequence[int]:
        """The sizes of the frames that follow on the socket. ProtocolError where they cannot be what was asked for."""
        number = next(self._numbers) & 0xFFFFFFFF
        await sock.send(Kind.READ, number, Read(*pack_keys(transfer.keys), transfer.lease))
        frames = await sock.expect(Kind.FRAMES, number, Frames)
        if len(frames.sizes) != 8 * len(transfer.keys):
            raise ProtocolError("it answered a read with another number of frames")
        sizes = array("Q", frames.sizes)
        for size, buffer in zip(sizes, transfer.buffers, strict=True):
            if size and (not FRAME_HEADER_BYTES < size <= buffer.nbytes or size % FRAME_ALIGN_BYTES):
                raise ProtocolError(f"it announced a frame of {size} bytes where {buffer.nbytes} fit")
        return sizes

    async def _receive(
        self,
        sock: PeerSocket,
        transfer: Transfer,
        sizes: Sequence[int],
        outcomes: list[LoadOutcome],
        seconds: float,
    ) -> BaseException | None:
        coming = [index for index, size in enumerate(sizes) if size]
        for index, size in enumerate(sizes):
            if not size:
                outcomes[index] = LoadOutcome.MISSING
        if not coming:
            return None
        addresses, _ = ranges([transfer.buffers[index] for index in coming])
        digests, hashes = pack_keys(transfer.keys[index] for index in coming)
        faults, error = await self._threads.run(
            partial(
                _native.receive_frames,
                *(sock.fd, addresses, words([sizes[index] for index in coming]), digests, hashes),
                max(0.0, seconds),
                limits.PEER_IDLE_SECONDS,
            )
        )
        for index, reason in zip(coming, faults, strict=False):
            outcomes[index] = LoadOutcome.CORRUPT if reason else LoadOutcome.LOADED
        return OSError(error, "its frames did not all come") if error else None

    def close(self) -> None:
        self._connections.cut()
