"""The lock of the process that fills slots for a server, as the next server sees it."""

from __future__ import annotations

import os
from pathlib import Path

from lmcache.memory.ownership import highest_locked_owner, other_writer_lives, try_lock_writer

EPOCHS = [bytes(16), b"\1" + bytes(15), b"\xff" * 16, bytes(range(16))]


def test_those_of_all_other_servers_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "l1"
    path.touch()
    server = os.open(path, os.O_RDWR)
    for of in EPOCHS:
        writer = os.open(path, os.O_RDWR)
        assert try_lock_writer(writer, of) and not try_lock_writer(server, of)
        assert [other_writer_lives(server, epoch) for epoch in EPOCHS] == [epoch != of for epoch in EPOCHS]
        assert not highest_locked_owner(server)
        os.close(writer)
        assert not any(other_writer_lives(server, epoch) for epoch in EPOCHS)
    os.close(server)
