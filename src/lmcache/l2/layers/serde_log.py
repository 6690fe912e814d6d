"""What the log says of a serde: a line of each kind once a minute at most."""

from __future__ import annotations

import logging

from lmcache.l2.layers.context import AdapterContext
from lmcache.telemetry.log_limiter import LogLimiter

log = logging.getLogger("lmcache.l2")

_LOG_SECONDS = 60.0  # between two lines of a kind


class SerdeLog:
    def __init__(self, context: AdapterContext, serde: str) -> None:
        """`serde` is the name of the chain."""
        self._adapter_name = context.name
        self._serde = serde
        self._limiter = LogLimiter(_LOG_SECONDS, context.clock)

    def warn(self, sentence: str, *values: object) -> None:
        """`sentence` is the kind, with a place for each of `values`."""
        if self._limiter.due(sentence):
            log.warning("%s: %s (serde %s)", self._adapter_name, sentence % values, self._serde)
