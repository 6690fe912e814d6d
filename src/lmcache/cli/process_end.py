"""How a process that serves ends."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import NoReturn


def end_process(exit_code: int) -> NoReturn:
    """Without waiting for pool threads, as the interpreter would: some may hang in a backend or in the kernel."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or without a reader
            stream.flush()
    os._exit(exit_code)
