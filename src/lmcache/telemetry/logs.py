"""Log lines for operators: `[2026-01-31 12:00:00,123] LMCache INFO: message`, on stderr."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import TextIO

from lmcache.errors import ConfigError, LMCacheError
from lmcache.telemetry.line_writer import LineWriter

LEVEL_VARIABLE = "LMCACHE_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
ROOT_LOGGER = "lmcache"
_DRAIN_SECONDS = 1.0
_HARMLESS = {number: f"\\x{number:02x}" for number in (*range(32), *range(127, 160))} | {
    **{ord(end): " " for end in "\n\r"},
    **{number: f"\\u{number:04x}" for number in (0x2028, 0x2029)},
    ord("\t"): "\t",
}
FORMAT = "[%(asctime)s] LMCache %(levelname)s: %(message)s"


def level_from(environ: Mapping[str, str]) -> str:
    """The level in LMCACHE_LOG_LEVEL, INFO without it. ConfigError when it names no level."""
    level = environ.get(LEVEL_VARIABLE) or "INFO"
    if level.upper() not in LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE} must be one of {', '.join(LEVELS)}, got {level!r}.")
    return level.upper()


class _Formatter(logging.Formatter):
    """One line a record: the stack of an exception is only written at level DEBUG."""

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_info and not logging.getLogger(ROOT_LOGGER).isEnabledFor(logging.DEBUG):
            fault = record.exc_info[1]
            record = logging.makeLogRecord({**record.__dict__, "exc_info": None, "exc_text": None})
            return _one_line(f"{super().format(record)} ({type(fault).__name__}: {fault})")
        return super().format(record) if record.exc_info else _one_line(super().format(record))


def _one_line(text: str) -> str:
    """Names come from engines and backends: none may look like a line of its own, or give orders to a terminal."""
    return text.translate(_HARMLESS)


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # not subscriptable before Python 3.11
    def close(self) -> None:
        if isinstance(self.stream, LineWriter):
            self.stream.drain(_DRAIN_SECONDS)
        super().close()


class _JsonFormatter(logging.Formatter):
    """An object a line: time (UTC, RFC 3339), level, logger, thread, message; error and, at level DEBUG, stack."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc)
        fields = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "thread": record.threadName,
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[1] is not None:
            fields["error"] = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
            if logging.getLogger(ROOT_LOGGER).isEnabledFor(logging.DEBUG):
                fields["stack"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def configure_logs(
    level: str,
    *,
    warnings_only: bool = False,
    stream: TextIO | LineWriter | None = None,
    as_json: bool = False,
) -> None:
    """Sends what this package logs to `stream` (stderr). Idempotent. `warnings_only` is --disable-logging."""
    logger = logging.getLogger(ROOT_LOGGER)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = _Handler(sys.stderr if stream is None else stream)  # an empty LineWriter is falsy
    handler.setFormatter(_JsonFormatter() if as_json else _Formatter(FORMAT))
    logger.addHandler(handler)
    logger.propagate = False
    set_level("WARNING" if warnings_only and level in ("DEBUG", "INFO") else level)


def drain_logs(seconds: float) -> None:
    """Waits until what was logged is written, or for that long."""
    for handler in logging.getLogger(ROOT_LOGGER).handlers:
        if isinstance(handler, _Handler) and isinstance(handler.stream, LineWriter):
            handler.stream.drain(seconds)


class _FaultCounter(logging.Handler):
    def __init__(self, count: Callable[[str], object]) -> None:
        super().__init__(logging.ERROR)
        self._count = count

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self._count(record.name)


def count_faults(count: Callable[[str], object]) -> Callable[[], None]:
    """Calls `count` with the logger's name for each error that is logged with its exception: the root of every thread,
    task and request logs unexpected ones so. The function that is returned ends this."""
    handler = _FaultCounter(count)
    logger = logging.getLogger(ROOT_LOGGER)
    logger.addHandler(handler)
    return lambda: logger.removeHandler(handler)


def level_of(fault: BaseException) -> int:
    """WARNING for faults of disks and backends, ERROR for unexpected ones."""
    return logging.WARNING if isinstance(fault, OSError | LMCacheError) else logging.ERROR


def set_level(level: str) -> None:
    logging.getLogger(ROOT_LOGGER).setLevel(level)


def current_level() -> str:
    return logging.getLevelName(logging.getLogger(ROOT_LOGGER).getEffectiveLevel())
