"""What a TensorRT-LLM worker does in a step, and which requests' copies have ended on it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from lmcache.integration.engine.connector_metadata import ConnectorMetadata, StoreOrder
from lmcache.integration.engine.worker_side import EndedLoads, WorkerSide

log = logging.getLogger("lmcache.tensorrt_llm")


class LoadFailed(RuntimeError):
    """TensorRT-LLM has counted on KV that could not be loaded and takes no word of it: the rank has to stop."""


class WorkerSteps:
    """Belongs to the worker's thread."""

    def __init__(self, side: WorkerSide) -> None:
        self.side = side
        self._due = ConnectorMetadata()  # of the present step, as far as it has not begun
        self._storing: dict[int, str] = {}  # requests by job
        self._asked_saved: set[str] = set()
        self._asked_loaded: set[str] = set()
        self._loading: set[str] = set()
        self._loaded: set[str] = set()

    def bind(self, metadata: ConnectorMetadata) -> None:
        """The orders of a step. Stores of one before that computed nothing are not done."""
        self._due = ConnectorMetadata(loads=list(metadata.loads), stores=list(metadata.stores))

    def start_loads(self) -> None:
        loads, self._due.loads = self._due.loads, []
        self._loading.update(order.request_id for order in loads)
        self.side.start_loads(ConnectorMetadata(loads=loads), idle_step=False)

    def start_stores(self) -> None:
        """After the forward pass has been launched."""
        stores: Sequence[StoreOrder]
        stores, self._due.stores = self._due.stores, []
        self._storing.update((order.job, order.request_id) for order in stores)
        self.side.start_stores(ConnectorMetadata(stores=list(stores)))

    def finished(self, finished: Iterable[int], loading: Iterable[int]) -> tuple[list[int], list[int]]:
        """`finished`: requests that have ended and whose blocks the engine keeps; `loading`: that have begun to load.
        Of those named so far: (which have no copy under way any more, which have loaded), each once.

        LoadFailed for a load that failed, unless its request has ended meanwhile."""
        self._asked_saved.update(map(str, finished))
        self._asked_loaded.update(map(str, loading))
        self._take(self.side.ended_loads())
        report = self.side.report()
        for job in report.ended_stores if report is not None else ():
            self._storing.pop(job, None)
        busy = {*self._storing.values(), *self._loading}
        saved = self._asked_saved - busy
        loaded = self._asked_loaded & (self._loaded | saved)  # one that ended before its load began will never load
        self._asked_saved -= saved
        self._asked_loaded -= loaded
        self._loaded -= loaded | saved
        return sorted(map(int, saved)), sorted(map(int, loaded))

    def _take(self, ended: EndedLoads) -> None:
        self._loading -= ended.requests
        self._loaded |= ended.requests
        failed = ended.failed_requests - self._asked_saved
        if failed:
            raise LoadFailed(
                f"The cached KV of request {min(failed)} could not be loaded as it was stored, and TensorRT-LLM cannot "
                "be told to compute it instead: this rank stops rather than go on with other bytes."
            )

    def check_idle(self) -> None:
        """AssertionError if a copy is under way or a request is kept."""
        kept = {*self._storing.values(), *self._loading, *self._asked_saved, *self._asked_loaded, *self._loaded}
        assert not kept, f"kept: {sorted(kept)}"
        self.side.check_idle()

    def close(self) -> None:
        self.side.close()
