"""One request: its tokens and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lmcache.core import limits
from lmcache.core.key_batch import KeyBatch, SlotGrid
from lmcache.service.named_keys import NamedKeys
from lmcache.service.token_chain import TokenChain
from lmcache.telemetry.tracing import Trace


class LeasedPrefix(NamedTuple):
    """The chunks that one lookup leased: those that L1 had, and those that were loaded behind them."""

    keys: KeyBatch
    slots: SlotGrid
    leases: tuple[int, ...]  # numbers in the native core
    l1_chunks: int = 0  # of the first ones, that L1 had

    @property
    def number(self) -> int:
        """The engine's name for it."""
        return self.leases[0]

    def row(self, kv_rank: int, group: int, groups: int) -> int | None:
        """The row of a rank's object group in `slots`; None when the lease does not cover that rank."""
        row = (kv_rank - self.keys.namespaces[0].rank) * groups + group
        return row if 0 <= row < len(self.keys.namespaces) else None

    @property
    def chunks(self) -> int:
        return self.slots.chunks


class CountedLookup(NamedTuple):
    """What the metrics have of a request: its longest lookup, and its best answer. In chunks."""

    requested: int
    hit: int
    hit_l1: int


class Session:
    """A request of one instance, from its first tokens to EndSession."""

    __slots__ = (
        "cancel_lookup",
        "chain",
        "counted",
        "counted_bytes",
        "held_bytes",
        "leased_at",
        "prefix",
        "request_id",
        "trace",
        "trace_is_drawn",
    )

    def __init__(self, request_id: str, chain: TokenChain | NamedKeys) -> None:
        self.request_id = request_id
        self.chain = chain
        self.prefix: LeasedPrefix | None = None
        self.trace: Trace | None = None
        self.trace_is_drawn = False  # whether it was decided: one draw a request, however often it is looked up
        self.leased_at = 0.0  # when it got that
        self.counted: CountedLookup | None = None  # None: no lookup was answered
        self.cancel_lookup: Callable[[], None] | None = None  # while a lookup waits for L2
        self.held_bytes = 0  # that the lookup or the leased prefix takes beyond the chain, at most
        self.counted_bytes = 0  # that `SessionTable` has counted for it

    @property
    def size_bytes(self) -> int:
        return session_bytes(self.request_id, self.chain.size_bytes, self.held_bytes)

    @property
    def idle(self) -> bool:
        """Whether nothing but its hashes would be lost with it."""
        return self.prefix is None and self.cancel_lookup is None


def session_bytes(request_id: str, chain_bytes: int, held_bytes: int) -> int:
    return limits.SESSION_BASE_BYTES + len(request_id.encode()) + chain_bytes + held_bytes
