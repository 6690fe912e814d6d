"""Expected outcomes as values."""

from __future__ import annotations

import enum


class StoreOutcome(enum.Enum):
    STORED = "stored"
    ALREADY_THERE = "already_there"
    FULL = "full"  # the backend is at its capacity
    TOO_LARGE = "too_large"  # the backend can never hold an object of this size
    FAILED = "failed"  # an I/O fault; the adapter counted it


HELD = (StoreOutcome.STORED, StoreOutcome.ALREADY_THERE)  # the backend has the object now


class LoadOutcome(enum.Enum):
    LOADED = "loaded"  # the whole frame is in the buffer; not yet verified
    MISSING = "missing"
    CORRUPT = "corrupt"  # truncated, foreign, or wrong header; the adapter has quarantined or deleted it
    FAILED = "failed"


class MissReason(enum.Enum):
    """Why the tokens of a lookup beyond the hit were not served."""

    NOT_STORED = "not_stored"  # never here, or longer ago than is remembered, or under other weights or another salt
    EVICTED = "evicted"  # it was in L1 and left to make room, and no adapter has it
    OVER_QUOTA = "over_quota"  # the same, while its cache salt had more than its quota
    CLEARED = "cleared"  # by an operator
    ABANDONED = "abandoned"  # its writer vanished before the commit
    NO_ROOM_TO_STORE = "no_room_to_store"
    BEING_STORED = "being_stored"  # reserved by an engine that has not committed it yet
    OTHER_LAYOUT = "other_layout"  # L1 has it for a KV layout that another engine of this model has or had
    TOO_SHORT = "too_short"  # fewer tokens than one chunk
    INSTANCE_INCOMPLETE = "instance_incomplete"  # not every rank has registered
    NO_ROOM = "no_room"  # L1 could not hold what L2 has
    L2_DEADLINE = "l2_deadline"
    RECOMPUTE_FASTER = "recompute_faster"  # the engine expects to compute sooner than to load
    L2_FAILED = "l2_failed"
    L2_SUSPENDED = "l2_suspended"  # an adapter that failed is left alone, so nobody knows what it has
    CORRUPT = "corrupt"
