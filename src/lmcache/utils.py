"""The name that vLLM's own connector module imports from here."""

from __future__ import annotations

import logging


def init_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)
