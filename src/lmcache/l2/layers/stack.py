"""The order of the layers, outermost first. Each gets the one below it and knows no other.

    Runner            l2/runner.py: refuses while the server drains, keeps the inventory: what is known is not stored
                      again, what is being read is not evicted
    SerdeLayer        where the adapter has a "serde": encodes and decodes, once however often a batch is retried
    CapacityLayer     stores: makes room, reserves it, refuses what does not fit
    RetryLayer        a batch again, for the objects that failed in it
    BreakerLayer      suspends a backend that fails; loads and stores apart
    ConcurrencyLimit  so many calls at once, abandoned ones included
    DeadlineLayer     stops waiting for a call; the call itself goes on
    Adapter           one backend: local, remote or a peer

What changes the bytes stands above `CapacityLayer`: the ledger charges what is really written. Below the runner all
keys are those of stored objects, which differ from the served ones where there is a serde.
"""

from __future__ import annotations

from lmcache.core import limits
from lmcache.l2.layers.breaker import BreakerLayer
from lmcache.l2.layers.capacity import CapacityLayer
from lmcache.l2.layers.concurrency_limit import ConcurrencyLimit
from lmcache.l2.layers.context import AdapterContext
from lmcache.l2.layers.deadline import DeadlineLayer
from lmcache.l2.layers.deletion import AdapterDeletion
from lmcache.l2.layers.eviction import AdapterEviction
from lmcache.l2.layers.retries import RetryLayer
from lmcache.l2.layers.serde import LoadBatch, SerdeLayer
from lmcache.serde.base import Chain


class CallLayers:
    """The layers of one direction, "loads" or "stores"."""

    def __init__(self, direction: str, max_running: int, context: AdapterContext) -> None:
        name = context.name
        self.circuit = context.circuit_breaker(limits.L2_BREAKER_FAILURES)
        self.deadline = DeadlineLayer(name, context.metrics.timeouts)
        self.limit = ConcurrencyLimit(name, max_running, self.deadline)
        self.breaker = BreakerLayer(direction, name, self.circuit, context.on_change, self.limit)
        self.retries = RetryLayer(context.rng, self.breaker)


class LayerStack:
    def __init__(self, context: AdapterContext, serde: Chain | None, load_batch: LoadBatch) -> None:
        """`load_batch` has the adapter fill a batch, through `loads`."""
        most_calls = context.adapter_calls
        self.loads = CallLayers("loads", most_calls or limits.L2_MAX_READS_IN_FLIGHT, context)
        self.stores = CallLayers("stores", limits.L2_MAX_WRITES_IN_FLIGHT, context)
        # A question what the backend has must not queue behind long loads of others.
        most_probes = most_calls or limits.L2_MAX_PROBES_IN_FLIGHT
        self._probe_limit = ConcurrencyLimit(context.name, most_probes, self.loads.deadline)
        self.probes = BreakerLayer("loads", context.name, self.loads.circuit, context.on_change, self._probe_limit)
        # Nor behind questions that wait for what somebody is still storing.
        most_waits = most_calls or limits.L2_MAX_WAITS_IN_FLIGHT
        self._wait_limit = ConcurrencyLimit(context.name, most_waits, self.loads.deadline)
        self.waits = BreakerLayer("loads", context.name, self.loads.circuit, context.on_change, self._wait_limit)
        self.deletion = AdapterDeletion(context, self.stores.breaker)
        self.eviction = AdapterEviction(context, self.deletion)
        self.capacity = CapacityLayer(context, self.eviction, self.stores.retries)
        self.serde = SerdeLayer(context, serde, self.capacity, load_batch, self.stores.breaker) if serde else None

    def close_reads(self) -> None:
        """No load and no probe begins any more. Deletions may: they are a part of the end."""
        self.loads.limit.is_closed = self._probe_limit.is_closed = self._wait_limit.is_closed = True
