"""What stands in for the adapters under a connector class of vLLM that calls them as other versions of LMCache do."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger("lmcache.vllm")

_NO_CHUNK_BLOCKS = 1 << 30  # longer than any request: the engine finds no whole chunk to store


class UncachedAdapter:
    """Of scheduler and worker. Nothing is found, nothing stored; whatever else is called does nothing."""

    def num_blocks_per_chunk(self) -> int:
        return _NO_CHUNK_BLOCKS

    def check_lookup_result(self, request_id: str, *_: Any, **__: Any) -> int:
        return 0

    def get_finished(self, *_: Any, **__: Any) -> tuple[None, None]:
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class CalledAsDeclared:
    """A class whose calls with other arguments than it takes give an `UncachedAdapter`, so that the engine starts."""

    says_so = False  # whether the class logs it; the other one is silent

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        try:
            inspect.signature(cls.__init__).bind(None, *arguments, **keywords)
        except TypeError as error:
            if cls.says_so:
                log.error(
                    "This engine runs uncached: its connector class calls %s otherwise than this version of LMCache "
                    "does (%s); use a version of vLLM that `lmcache doctor` names as tested.",
                    cls.__name__,
                    error,
                )
            return UncachedAdapter()
        return super().__new__(cls)
