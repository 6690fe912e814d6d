"""Spans of requests. What makes them never waits: a full queue drops them, counted.

request                  from its first lookup to its end
  mp.lookup_prefetch     a lookup and its answer
    l1, l2 NAME          what each tier took for it
  mp.store               a reservation and its commit, by each worker
    l2 NAME              the copy to an adapter, which may end after the request
  mp.retrieve            a lease, from the answer to its release
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from lmcache.clock import Clock

Attributes = tuple[tuple[str, str | int | float], ...]

_TRACE_ID_BYTES = 16
_SPAN_ID_BITS = 64
_SAMPLED = 1
_TRACE_PARENT = re.compile("[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")


class TierTime(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What one tier took for a request, in seconds of the monotonic clock."""

    tier: str  # "l1", or "l2" and the name of an adapter
    started: float
    ended: float
    objects: int = 0


class Span(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """As it goes to the process that exports. Seconds of the server's monotonic clock. `parent_id` 0: none.

    Thousands may wait: the garbage collector does not look at them.
    """

    name: str
    trace_id: bytes
    span_id: int
    parent_id: int
    started: float
    ended: float
    attributes: Attributes
    tiers: Sequence[TierTime] = ()  # spans below it, which get their ids from the exporter


class Trace:
    """The trace of one request."""

    __slots__ = ("_begun", "_parent_id", "_request_id", "_tracer", "span_id", "trace_id")

    def __init__(self, tracer: Tracer, request_id: str, trace_id: bytes, parent_id: int) -> None:
        self._tracer = tracer
        self._request_id = request_id
        self._parent_id = parent_id
        self._begun = tracer.now()
        self.trace_id = trace_id
        self.span_id = tracer.new_span_id()

    def child(
        self,
        name: str,
        started: float,
        ended: float,
        attributes: Attributes = (),
        tiers: Sequence[TierTime] = (),
        *,
        parent_id: int = 0,
    ) -> int:
        """A span below the request's, or below `parent_id`; its id."""
        span_id = self._tracer.new_span_id()
        self._tracer.put(
            Span(name, self.trace_id, span_id, parent_id or self.span_id, started, ended, attributes, tiers)
        )
        return span_id

    def end(self) -> None:
        attributes = (("request_id", self._request_id),)
        self._tracer.put(
            Span("request", self.trace_id, self.span_id, self._parent_id, self._begun, self._tracer.now(), attributes)
        )


class StoredTrace(NamedTuple):
    """The span that what is written to L2 belongs below."""

    trace: Trace
    span_id: int

    def written(self, tier: str, started: float, ended: float, objects: int) -> None:
        self.trace.child(f"l2 {tier}", started, ended, (("objects", objects),), parent_id=self.span_id)


class Tracer:
    def __init__(self, put: Callable[[Span], object], *, sample_rate: float, clock: Clock, rng: random.Random) -> None:
        """`sample_rate`: of requests that come without a trace, from 0 to 1; others are sampled as their trace is."""
        self.put = put
        self.now = clock.monotonic
        self._sample_rate = sample_rate
        self._rng = rng

    def new_span_id(self) -> int:
        return self._rng.getrandbits(_SPAN_ID_BITS) or 1

    def new_trace_id(self) -> bytes:
        return self._rng.randbytes(_TRACE_ID_BYTES)

    def begin(self, request_id: str, trace_parent: str) -> Trace | None:
        """None: it is not sampled."""
        parent = _parse(trace_parent) if trace_parent else None
        if parent is not None:
            trace_id, parent_id, flags = parent
            return Trace(self, request_id, trace_id, parent_id) if flags & _SAMPLED else None
        if self._sample_rate < 1 and self._rng.random() >= self._sample_rate:
            return None
        return Trace(self, request_id, self.new_trace_id(), 0)


def _parse(trace_parent: str) -> tuple[bytes, int, int] | None:
    """Trace id, span id and flags of W3C Trace Context; None for what is none."""
    match = _TRACE_PARENT.fullmatch(trace_parent)
    if match is None:
        return None
    trace_id, parent_id, flags = bytes.fromhex(match[1]), int(match[2], 16), int(match[3], 16)
    return (trace_id, parent_id, flags) if any(trace_id) and parent_id else None
