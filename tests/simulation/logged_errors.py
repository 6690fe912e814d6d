"""What the connector logs in a simulation."""

from __future__ import annotations

import logging
from collections import Counter


class LoggedErrors(logging.Handler):
    """Faults that the connector contains are still faults."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.faults: list[str] = []
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        self.counts[str(record.msg)] += 1
        if record.exc_info:
            self.faults.append(self.format(record))
