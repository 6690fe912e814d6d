"""Tells a proxy which requests are stored: one that sends a request to a decode engine only then waits for it.

Each request is told once by each rank that stores, when the engine has ended it and all that was ordered to be stored
of it has ended, also where nothing was: whoever waits goes on, and the decode engine computes what it does not find.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from lmcache.client.engine_environment import ENGINE_SYSTEM, EngineEnvironment
from lmcache.core import limits
from lmcache.errors import LMCacheError
from lmcache.integration.engine.connector_metadata import StoreOrder
from lmcache.integration.engine.telemetry_endpoint import TelemetryEndpoint
from lmcache.telemetry.batch_queue import BatchQueue
from lmcache.telemetry.log_limiter import LogLimiter

log = logging.getLogger("lmcache.engine")

_LOG_SECONDS = 60.0
_CLOSE_SECONDS = 1.0  # that the end of an engine waits for what is still to be told


@dataclass(frozen=True)
class StoringRank:
    """Whose stores are told: `world_size` ranks hold distinct KV of that model."""

    model_name: str
    world_size: int
    kv_rank: int


class StoreTelemetry:
    """The engine's thread and the one that stores call it and never wait: events are posted by a thread of its own.
    What it cannot post in time is dropped and counted."""

    def __init__(
        self, endpoint: TelemetryEndpoint, rank: StoringRank, environment: EngineEnvironment = ENGINE_SYSTEM
    ) -> None:
        self._endpoint = endpoint
        self._rank = rank
        self._now = environment.clock.monotonic
        self._lock = environment.lock()
        self._orders: dict[str, int] = {}  # that have not ended, by request
        self._ended: set[str] = set()  # requests that the engine has ended, of which orders have not
        self._told = self._lost = 0
        self._warnings = LogLimiter(_LOG_SECONDS, environment.clock)
        self._queue: BatchQueue[str] = BatchQueue(
            self._tell, limits.MAX_TELEMETRY_REQUESTS_WAITING, "lmcache-telemetry"
        )
        self._queue.start()
        log.info("%s is told which requests are stored", endpoint.url)

    # ---- the engine's threads ----------------------------------------------------------------------------------------
    def ordered(self, orders: Iterable[StoreOrder]) -> None:
        """To be called before they can end."""
        with self._lock:
            for order in orders:
                if order.request_id:
                    self._orders[order.request_id] = self._orders.get(order.request_id, 0) + 1

    def settled(self, order: StoreOrder, stored: bytes) -> None:
        """An order has ended: the server knows what of it is stored, or never will. As `Storer` calls `on_stored`."""
        with self._lock:
            left = self._orders.pop(order.request_id, 0) - 1
            if left > 0:
                self._orders[order.request_id] = left
            if left != 0 or order.request_id not in self._ended:
                return
            self._ended.discard(order.request_id)
        self._queue.put(order.request_id)

    def requests_ended(self, request_ids: Collection[str]) -> None:
        """The engine has ended them, and orders nothing more to be stored of them."""
        if not request_ids:
            return
        with self._lock:
            waiting = self._orders.keys() & request_ids
            self._ended |= waiting
        for request_id in request_ids:
            if request_id not in waiting:
                self._queue.put(request_id)

    def counts(self) -> list[int]:
        """Requests that were told since the start, and requests that could not be."""
        with self._lock:
            return [self._told, self._lost]

    def close(self) -> None:
        """Posts what waits, as far as a short time allows. Idempotent."""
        self._queue.stop(_CLOSE_SECONDS)

    # ---- the thread of its own ---------------------------------------------------------------------------------------
    def _tell(self, request_ids: list[str], dropped: int) -> None:
        lost, reason = dropped, f"more than {limits.MAX_TELEMETRY_REQUESTS_WAITING} waited"
        for start in range(0, len(request_ids), limits.MAX_TELEMETRY_REQUESTS_PER_POST):
            batch = request_ids[start : start + limits.MAX_TELEMETRY_REQUESTS_PER_POST]
            try:
                self._endpoint.post(self._event(batch), limits.TELEMETRY_POST_SECONDS, self._now)
            except LMCacheError as error:
                lost, reason = lost + len(batch), str(error)
            else:
                with self._lock:
                    self._told += len(batch)
        if not lost:
            return
        with self._lock:
            self._lost += lost
        if self._warnings.due():
            log.warning("A proxy was not told that %d requests are stored: %s", lost, reason)

    def _event(self, request_ids: list[str]) -> bytes:
        rank = self._rank
        event = {
            "event": "request_store_finished",
            "request_ids_set": request_ids,
            "model_name": rank.model_name,
            "world_size": rank.world_size,
            "kv_rank": rank.kv_rank,
        }
        return json.dumps(event).encode()
