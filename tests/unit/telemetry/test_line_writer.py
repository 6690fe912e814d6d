"""Log lines that somebody reads late, or not at all."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import pytest

from lmcache.telemetry.line_writer import LineWriter
from polling import until

SECONDS = 30.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def read_lines(fd: int, last: str) -> list[str]:
    text = ""
    while not text.endswith(last):
        text += os.read(fd, 65536).decode()
    return text.splitlines()


def test_lines_come_out_in_their_order(pipe: tuple[int, int]) -> None:
    writer = LineWriter(pipe[1])
    for number in range(100):
        assert writer.write(f"{number}\n")
        writer.flush()
    assert writer.drain(SECONDS)
    assert read_lines(pipe[0], "99\n") == [str(number) for number in range(100)]


@pytest.mark.parametrize("blocking", [True, False])
def test_nobody_waits_for_a_reader_and_what_was_too_much_is_counted(pipe: tuple[int, int], blocking: bool) -> None:
    os.set_blocking(pipe[1], blocking)
    writer = LineWriter(pipe[1], max_lines=10)
    writer.write("x" * 10_000 + "\n")
    until(lambda: not len(writer))  # it is being written, which the pipe has no room for
    for number in range(15):
        writer.write(f"{number}\n")
    assert not writer.drain(0.0)
    lines = read_lines(pipe[0], "in time\n")
    assert lines[0] == "x" * 10_000
    assert lines[1:] == [
        *(str(number) for number in range(10)),
        "LMCache WARNING: 5 log lines were lost: they were not read in time",
    ]
    assert writer.drain(SECONDS)
    writer.write("again\n")
    assert read_lines(pipe[0], "again\n") == ["again"]
    assert writer.drain(SECONDS)


def test_a_reader_that_has_gone_does_not_end_it() -> None:
    reader, fd = os.pipe()
    os.close(reader)
    writer = LineWriter(fd)
    for _ in range(2):
        writer.write("nobody\n")
        assert writer.drain(SECONDS)
    os.close(fd)
