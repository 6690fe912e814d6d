"""Frames over TCP connections of their own, received straight into the buffers by native code."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from itertools import count
from operator import le

from lmcache import _native
from lmcache.clock import SystemClock
from lmcache.core import limits
from lmcache.core.key_batch import pack_keys
from lmcache.core.limits import FRAME_ALIGN_BYTES, FRAME_HEADER_BYTES
from lmcache.core.outcome import LoadOutcome
from lmcache.errors import AdapterError, ProtocolError
from lmcache.l2.call_threads import CallThreads
from lmcache.l2.completions import ranges, words
from lmcache.peers.connections import ReadConnections
from lmcache.peers.protocol import HEADER, Frames, Kind, Read, Refused, decode, decode_header, encode
from lmcache.peers.sockets import PeerRefused, PeerSocket
from lmcache.peers.transports.contract import Fetched, Transfer


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
            sock = await self._connections.take(transfer.seconds)
            number = next(self._numbers) & 0xFFFFFFFF
            read = _Read(sock.fd, number, transfer, outcomes, StreamDeadline(deadline - loop.time()))
            fault = await self._threads.run(read.run)
        except (OSError, EOFError, ProtocolError, AdapterError, asyncio.TimeoutError) as error:
            fault = error
        except BaseException as error:
            fault = error
            raise
        finally:
            if sock is not None:
                (self._connections.give_back if fault is None else self._connections.drop)(sock)
        return Fetched(outcomes, fault)

    def close(self) -> None:
        self._connections.close()


class StreamDeadline:
    """What is left of some seconds, for native calls one behind the other."""

    def __init__(self, seconds: float) -> None:
        self._clock = SystemClock()
        self._ends_at = self._clock.monotonic() + seconds

    @property
    def left_seconds(self) -> float:
        return max(0.0, self._ends_at - self._clock.monotonic())


class _Read:
    """One read, on a thread: the request, the sizes, the frames. So that no step waits for its turn on a busy loop."""

    def __init__(
        self, fd: int, number: int, transfer: Transfer, outcomes: list[LoadOutcome], deadline: StreamDeadline
    ) -> None:
        """`outcomes` are changed, once it is known what came."""
        self._fd = fd
        self._number = number
        self._transfer = transfer
        self._outcomes = outcomes
        self._deadline = deadline

    def run(self) -> BaseException | None:
        """None when the connection can be used again. OSError, ProtocolError."""
        digests, hashes = pack_keys(self._transfer.keys)
        request = encode(Kind.READ, self._number, Read(digests, hashes, self._transfer.lease))
        # Each native call more would wait for its turn among the other threads.
        answer, error = _native.exchange(
            *(self._fd, request, HEADER.size, limits.MAX_PEER_MESSAGE_BYTES),
            *(self._deadline.left_seconds, limits.PEER_IDLE_SECONDS),
        )
        if error:
            raise OSError(error, "it did not answer the read")
        kind, number, _ = decode_header(answer[: HEADER.size])
        body = answer[HEADER.size :]
        if kind is Kind.REFUSED:
            raise PeerRefused(decode(body, Refused).sentence)
        if (kind, number) != (Kind.FRAMES, self._number):
            raise ProtocolError(f"it sent {kind.name} where {Kind.FRAMES.name} was expected")
        return self._receive_frames(decode(body, Frames).sizes, digests, hashes)

    def _receive_frames(self, packed: bytes, digests: bytes, hashes: bytes) -> BaseException | None:
        """`packed`: the sizes of the frames that follow. ProtocolError where they cannot be what was asked for."""
        buffers, outcomes = self._transfer.buffers, self._outcomes
        addresses, rooms = ranges(buffers)
        if len(packed) != rooms.nbytes:
            raise ProtocolError("it answered a read with another number of frames")
        sizes = array("Q", packed)
        _check_sizes(sizes, rooms)
        coming: Sequence[int] = range(len(sizes))
        if 0 in sizes:
            outcomes[:] = [LoadOutcome.FAILED if size else LoadOutcome.MISSING for size in sizes]
            coming = [index for index, size in enumerate(sizes) if size]
            if not coming:
                return None
            addresses = words([addresses[index] for index in coming])
            packed = words([sizes[index] for index in coming]).tobytes()
            digests, hashes = pack_keys(self._transfer.keys[index] for index in coming)
        faults, error = _native.receive_frames(
            *(self._fd, addresses, packed, digests, hashes),
            *(self._deadline.left_seconds, limits.PEER_IDLE_SECONDS),
        )
        for index, reason in zip(coming, faults, strict=False):
            outcomes[index] = LoadOutcome.CORRUPT if reason else LoadOutcome.LOADED
        return OSError(error, "its frames did not all come") if error else None


def _check_sizes(sizes: Sequence[int], rooms: Sequence[int]) -> None:
    fit = all(map(le, sizes, rooms))
    if fit and all(not size or (size > FRAME_HEADER_BYTES and not size % FRAME_ALIGN_BYTES) for size in set(sizes)):
        return
    raise ProtocolError("it announced frames of sizes that do not fit, or that no frame has")
