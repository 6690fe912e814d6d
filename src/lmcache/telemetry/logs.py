"""Log lines for operators: `[2026-01-31 12:00:00,123] LMCache INFO: message`, on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TextIO

from lmcache.errors import ConfigError

LEVEL_VARIABLE = "LMCACHE_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
ROOT_LOGGER = "lmcache"
FORMAT = "[%(asctime)s] LMCache %(levelname)s: %(message)s"


def level_from(environ: Mapping[str, str]) -> str:
    """The level that LMCACHE_LOG_LEVEL asks for; INFO without it. ConfigError when it is no level."""
    level = environ.get(LEVEL_VARIABLE) or "INFO"
    if level.upper() not in LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE} must be one of {', '.join(LEVELS)}, got {level!r}.")
    return level.upper()


class _Formatter(logging.Formatter):
    """One line a record. Where a fault is attached, its stack is only worth the lines to who asked for DEBUG."""

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_info and not logging.getLogger(ROOT_LOGGER).isEnabledFor(logging.DEBUG):
            fault = record.exc_info[1]
            record = logging.makeLogRecord({**record.__dict__, "exc_info": None, "exc_text": None})
            return f"{super().format(record)} ({type(fault).__name__}: {fault})".replace("\n", " ")
        return super().format(record)


def configure_logs(level: str, *, warnings_only: bool = False, stream: TextIO | None = None) -> None:
    """Sends what this package logs to `stream` (stderr). Idempotent. `warnings_only` is --disable-logging."""
    logger = logging.getLogger(ROOT_LOGGER)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Formatter(FORMAT))
    logger.addHandler(handler)
    logger.propagate = False
    set_level("WARNING" if warnings_only and level in ("DEBUG", "INFO") else level)


def set_level(level: str) -> None:
    logging.getLogger(ROOT_LOGGER).setLevel(level)


def current_level() -> str:
    return logging.getLevelName(logging.getLogger(ROOT_LOGGER).getEffectiveLevel())
