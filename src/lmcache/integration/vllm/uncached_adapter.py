"""What stands in for the adapters under a connector class of vLLM that calls them as other versions of LMCache do."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

log = logging.getLogger("lmcache.vllm")

_NO_CHUNK_BLOCKS = 1 << 30  # longer than any request: the engine finds no whole chunk to store


class UncachedAdapter:
    """Stands in for the adapters of scheduler and worker. Nothing is found, nothing stored; a load that is ordered all
    the same has failed, and the blocks of a finished request are given back. Whatever else is called does nothing."""

    def __init__(self) -> None:
        self._ended_loads: set[str] = set()
        self._failed_blocks: set[int] = set()

    def num_blocks_per_chunk(self) -> int:
        return _NO_CHUNK_BLOCKS

    def check_lookup_result(self, request_id: str, *_: Any, **__: Any) -> int:
        return 0

    def batched_submit_retrieve_requests(
        self, request_ids: Iterable[str], ops: Iterable[Any], *_: Any, **__: Any
    ) -> None:
        self._ended_loads.update(request_ids)
        for op in ops:
            self._failed_blocks.update(op.block_ids)

    def get_finished(
        self, finished_req_ids: Collection[str] = (), *_: Any, **__: Any
    ) -> tuple[set[str] | None, set[str] | None]:
        """The engine keeps the blocks of a finished request until it is named in either, and knows it no more then."""
        ended, self._ended_loads = self._ended_loads, set()
        return (set(finished_req_ids) - ended) or None, ended or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class CalledAsDeclared:
    """A class whose calls with other arguments than it takes give an `UncachedAdapter`, so that the engine starts."""

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        try:
            inspect.signature(cls.__init__).bind(None, *arguments, **keywords)
        except TypeError as error:
            log.error(
                "This engine runs uncached: its connector class calls %s otherwise than this version of LMCache "
                "does (%s); use a version of vLLM that `lmcache doctor` names as tested.",
                cls.__name__,
                error,
            )
            return UncachedAdapter()
        return super().__new__(cls)
