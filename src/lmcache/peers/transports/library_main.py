"""`python -m lmcache.peers.transports.library_main`: a transfer engine on the L1 file of a server, for that server.

Messages (`library`) come framed over the socket that is its standard input: first the settings, answered by Ready, then
orders to read. It ends with that socket, so with the server.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import sys
import threading
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec

from lmcache import _native
from lmcache.core import limits
from lmcache.core.framed_messages import framed, read_payloads
from lmcache.errors import ResourceError
from lmcache.memory.header import HEADER_BYTES, Header
from lmcache.memory.ownership import try_lock_writer
from lmcache.peers.transports.library import (
    LateRead,
    Library,
    LibrarySettings,
    ReadEnd,
    ReadOrder,
    Ready,
    RefusedRead,
    Region,
)
from lmcache.peers.transports.mooncake_te import MooncakeLibrary
from lmcache.peers.transports.nixl import NixlLibrary

LIBRARIES: Mapping[str, Callable[[LibrarySettings, int], Library]] = {
    "nixl": NixlLibrary,
    "mooncake_te": MooncakeLibrary,
}

_PR_SET_PDEATHSIG = 1
_COULD_NOT = "the transfer engine cannot use L1"


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # systemd sends it to all processes of a service
        signal.signal(number, signal.SIG_IGN)  # the server decides when this one ends
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # whatever a library call is busy with by then
    os.dup2(2, 1)  # what libraries print
    channel = socket.socket(fileno=os.dup(0))
    messages = read_payloads(channel.makefile("rb"))
    settings = msgspec.msgpack.decode(next(messages), type=LibrarySettings)
    try:
        address = _map(settings, writable=not settings.serves)
        try:
            library = LIBRARIES[settings.engine](settings, address)
        except ResourceError:
            if not settings.serves:
                raise
            # An RDMA device may register only what could be written to.
            library = LIBRARIES[settings.engine](settings, address := _map(settings, writable=True))
        ready = Ready(msgspec.msgpack.encode(library.region()), "")
    except (ResourceError, OSError, ValueError) as error:
        channel.sendall(framed(Ready(b"", str(error) or _COULD_NOT)))
        return 1
    channel.sendall(framed(ready))
    reads = _Reads(library, address, settings.size_bytes, channel)
    with ThreadPoolExecutor(limits.PEER_LOAD_THREADS) as threads:
        for message in messages:
            threads.submit(reads.run, msgspec.msgpack.decode(message, type=ReadOrder))
        os._exit(0)  # the server has gone, and waits for nothing


_mapped: list[mmap.mmap] = []  # to the end of the process


def _map(settings: LibrarySettings, *, writable: bool) -> int:
    """Where L1 begins here. Read-only where others read from it: nobody writes into it by mistake. Who reads into it
    holds its lock to the end: the next server waits for that. OSError, ValueError: it is not the server's L1 any
    more."""
    fd = os.open(settings.path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        header = Header.unpack(os.pread(fd, HEADER_BYTES, 0))
        if header is None or (header.server_epoch, header.size_bytes) != (settings.server_epoch, settings.size_bytes):
            raise ValueError(f"{settings.path} is the L1 of another server")
        if not settings.serves and not try_lock_writer(fd, settings.server_epoch):
            raise ValueError(f"another process reads into {settings.path} for this server")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        _mapped.append(mmap.mmap(fd, settings.size_bytes, mmap.MAP_SHARED, protection))
    finally:
        os.close(fd)
    return _native.buffer_address(_mapped[-1])


class _Reads:
    def __init__(self, library: Library, address: int, size_bytes: int, channel: socket.socket) -> None:
        self._library = library
        self._address, self._size_bytes = address, size_bytes
        self._channel = channel
        self._sending = threading.Lock()

    def run(self, order: ReadOrder) -> None:
        try:
            self._read(order)
            end = ReadEnd(order.number, "")
        except LateRead:
            end = ReadEnd(order.number, "", was_late=True)
        except (RefusedRead, msgspec.MsgspecError, UnicodeDecodeError) as error:
            end = ReadEnd(order.number, str(error))
        except Exception as error:  # whatever a library raises: the server ends this process
            end = ReadEnd(order.number, str(error) or type(error).__name__, may_write=True)
        with self._sending:
            self._channel.sendall(framed(end))

    def _read(self, order: ReadOrder) -> None:
        """As `Library.read`. Nothing outside of the two regions is touched."""
        region = msgspec.msgpack.decode(order.ranges.region, type=Region)
        targets, sources, sizes = (
            array("Q", packed) for packed in (order.ranges.targets, order.ranges.sources, order.ranges.sizes)
        )
        for target, source, size in zip(targets, sources, sizes, strict=True):
            if target + size > self._size_bytes:
                raise RefusedRead("L1 is smaller than what it is to take")
            if source + size > region.size_bytes:
                raise RefusedRead("the other server registered less than it has objects in")
        self._library.read(
            region,
            [self._address + offset for offset in targets],
            [region.address + offset for offset in sources],
            sizes,
            order.deadline,
        )


if __name__ == "__main__":
    sys.exit(main())
