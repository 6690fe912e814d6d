"""Which processes run: one server per name by flock, one engine worker per byte by open-file-description locks, and so
one process that fills slots for a server.

The kernel drops both when the process dies, however it dies, so that no pid, heartbeat or clean-up is needed to know.
"""

from __future__ import annotations

import fcntl
import os
import struct

# struct flock: l_type, l_whence, l_start, l_len, l_pid
_FLOCK = struct.Struct("@hhqqi0q")
# Far beyond any content; locks do not care where a file ends.
_OWNER_REGION_OFFSET = 1 << 62
_MAX_OWNER = 1 << 32
_WRITER_REGION_OFFSET = _OWNER_REGION_OFFSET + _MAX_OWNER  # a byte for each server, by its epoch
_WRITER_BYTES = 6  # of an epoch
PEER_OWNER = -3  # what other servers look up and read
PIN_OWNER = -2  # pins of operators
STORAGE_OWNER = -1  # the storage loop of a server, which locks no byte; engines' owners count from 1
MAX_OWNERS_EVER = 1 << 31  # that one file can have had; what is left is enough for any server


def try_lock_server(fd: int) -> bool:
    """Takes the lock that a server holds until it ends; False if a running process has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def try_lock_owner(fd: int, owner: int) -> bool:
    """Takes the byte of an owner; False if another open file holds it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _byte(fcntl.F_WRLCK, owner))
    except BlockingIOError:
        return False
    return True


def unlock_owner(fd: int, owner: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _byte(fcntl.F_UNLCK, owner))


def is_owner_locked(fd: int, owner: int) -> bool:
    """Whether an open file other than `fd` holds the owner's byte."""
    return _is_locked(fd, _owner_offset(owner), 1)


def highest_locked_owner(fd: int) -> int:
    """The largest number whose byte an open file other than `fd` holds; 0 if there is none."""
    highest = 0
    while True:
        start = _OWNER_REGION_OFFSET + highest + 1
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, _MAX_OWNER - highest - 1, 0)
        lock_type, _, start, locked, _ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, request))
        if lock_type == fcntl.F_UNLCK:
            return highest
        highest = start + max(1, locked) - 1 - _OWNER_REGION_OFFSET  # any of them, above the last one


def try_lock_writer(fd: int, server_epoch: bytes) -> bool:
    """Takes the byte of the process that fills slots for this server; False if another open file holds it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _range(fcntl.F_WRLCK, _writer(server_epoch), 1))
    except BlockingIOError:
        return False
    return True


def other_writer_lives(fd: int, server_epoch: bytes) -> bool:
    """Whether an open file other than `fd` holds the byte of such a process of any server but this one."""
    mine = _writer(server_epoch)
    end = _WRITER_REGION_OFFSET + (1 << 8 * _WRITER_BYTES)
    others = ((_WRITER_REGION_OFFSET, mine), (mine + 1, end))
    return any(_is_locked(fd, first, last - first) for first, last in others if first < last)


def _writer(server_epoch: bytes) -> int:
    return _WRITER_REGION_OFFSET + int.from_bytes(server_epoch[:_WRITER_BYTES], "little")


def _is_locked(fd: int, offset: int, size_bytes: int) -> bool:
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _range(fcntl.F_WRLCK, offset, size_bytes))
    lock_type: int = _FLOCK.unpack(answer)[0]
    return lock_type != fcntl.F_UNLCK


def _byte(lock_type: int, owner: int) -> bytes:
    return _range(lock_type, _owner_offset(owner), 1)


def _owner_offset(owner: int) -> int:
    if not 0 <= owner < _MAX_OWNER:
        raise ValueError(f"owner {owner} is not between 0 and {_MAX_OWNER}")
    return _OWNER_REGION_OFFSET + owner


def _range(lock_type: int, offset: int, size_bytes: int) -> bytes:
    return _FLOCK.pack(lock_type, os.SEEK_SET, offset, size_bytes, 0)
