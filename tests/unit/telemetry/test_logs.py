from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Iterator

import pytest

from lmcache.errors import ConfigError
from lmcache.telemetry import logs
from lmcache.telemetry.line_writer import LineWriter


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    logger = logging.getLogger("lmcache")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield io.StringIO()
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_a_line_is_time_level_message(stream: io.StringIO) -> None:
    logs.configure_logs("INFO", stream=stream)
    logs.configure_logs("INFO", stream=stream)  # twice does not mean every line twice
    logging.getLogger("lmcache.tiering").info("Submitted store task %d", 7)
    logging.getLogger("lmcache.tiering").debug("not shown")
    assert re.fullmatch(
        r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\] LMCache INFO: Submitted store task 7\n", stream.getvalue()
    )


def test_what_others_named_makes_no_line_of_its_own(stream: io.StringIO) -> None:
    logs.configure_logs("INFO", stream=stream)
    logging.getLogger("lmcache.x").info("model %s", "m\n[2026-01-01 00:00:00,000] LMCache INFO: forged\r\n")
    assert stream.getvalue().count("\n") == 1 and stream.getvalue().endswith("LMCache INFO: forged  \n")
    logging.getLogger("lmcache.x").info("model %s", "m\x1b]0;title\x07\x9b31m\x85\u2028end\té")
    assert stream.getvalue().endswith("model m\\x1b]0;title\\x07\\x9b31m\\x85\\u2028end\té\n")
    assert len(stream.getvalue().splitlines()) == 2


def test_a_stack_is_only_for_debug(stream: io.StringIO) -> None:
    logger = logging.getLogger("lmcache.x")

    def fail() -> None:
        try:
            raise ValueError("two\nlines")
        except ValueError:
            logger.exception("It failed")

    logs.configure_logs("INFO", stream=stream)
    fail()
    assert stream.getvalue().endswith("LMCache ERROR: It failed (ValueError: two lines)\n")
    assert "Traceback" not in stream.getvalue()
    logs.set_level("DEBUG")
    fail()
    assert "Traceback" in stream.getvalue()


def test_an_object_a_line_whatever_others_named(stream: io.StringIO) -> None:
    logs.configure_logs("INFO", stream=stream, as_json=True)
    logger = logging.getLogger("lmcache.x")
    logger.info("model %s", 'm\n{"level": "ERROR"}\x1b\u2028é')
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("It failed")
    assert len(stream.getvalue().splitlines()) == 2
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["level"], first["logger"], first["thread"]) == ("INFO", "lmcache.x", "MainThread")
    assert first["message"] == 'model m\n{"level": "ERROR"}\x1b\u2028é'
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert (second["message"], second["error"], "stack" in second) == ("It failed", "ValueError: two\nlines", False)
    logs.set_level("DEBUG")
    try:
        raise ValueError
    except ValueError:
        logger.exception("Again")
    assert "Traceback" in json.loads(stream.getvalue().splitlines()[2])["stack"]


def test_disable_logging_leaves_warnings(stream: io.StringIO) -> None:
    logs.configure_logs("INFO", warnings_only=True, stream=stream)
    logging.getLogger("lmcache").info("quiet")
    logging.getLogger("lmcache").warning("loud")
    assert "quiet" not in stream.getvalue()
    assert "loud" in stream.getvalue()
    assert logs.current_level() == "WARNING"


def test_level_from_environment() -> None:
    assert logs.level_from({}) == "INFO"
    assert logs.level_from({"LMCACHE_LOG_LEVEL": "debug"}) == "DEBUG"
    with pytest.raises(ConfigError, match="DEBUG, INFO, WARNING, ERROR"):
        logs.level_from({"LMCACHE_LOG_LEVEL": "loud"})


def test_errors_are_counted_with_their_exception_and_only_until_stopped(stream: io.StringIO) -> None:
    counted: list[str] = []
    logger = logging.getLogger("lmcache.x")
    stop = logs.count_faults(counted.append)
    fault = ValueError("nobody expected it")
    logger.error("a defect", exc_info=fault)
    logger.error("a sentence for the operator")
    logger.warning("a disk", exc_info=fault)
    assert counted == ["lmcache.x"]
    stop()
    logger.error("a defect", exc_info=fault)
    assert counted == ["lmcache.x"]


def test_lines_go_through_a_writer_that_is_empty(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts its lines, so an empty one is false; stderr itself would make the server wait for its reader."""
    monkeypatch.setattr("sys.stderr", stream)
    reader, writer = os.pipe()
    logs.configure_logs("INFO", stream=LineWriter(writer))
    logging.getLogger("lmcache").info("through the pipe")
    assert b"through the pipe" in os.read(reader, 4096)
    assert stream.getvalue() == ""
    os.close(reader)
    os.close(writer)
