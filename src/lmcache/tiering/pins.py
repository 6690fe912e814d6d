"""Pins: an operator's protection of objects from eviction, in L1 and in every adapter that evicts, for a limited time.

A pin holds the copies that are there when it is made: as a lease of PIN_OWNER in L1 and holds in the ledgers of L2. It
is counted where they are counted, and an object stays until its last pin has ended. Pins end by request, by their time,
or with the server; they are not kept.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lmcache._native import NO_SLOT, LedgerHold
from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.core.key import ObjectKey
from lmcache.core.key_batch import SlotGrid, pack_keys
from lmcache.errors import LMCacheError
from lmcache.l1.store import L1Store
from lmcache.l2.runner import Runner
from lmcache.memory.ownership import PIN_OWNER
from lmcache.tiering.leases import FOREVER


@dataclass(frozen=True)
class PinFigures:
    """`objects` are held somewhere, of `missing` ones nothing was there."""

    pin_id: str
    owner: str
    objects: int
    missing: int
    remaining_seconds: float


@dataclass
class _Pin:
    number: int
    owner: str
    keys: set[ObjectKey]  # that are held
    missing: int
    deadline: float
    lease: int = 0
    holds: list[tuple[Runner, LedgerHold]] = field(default_factory=list)


class Pins:
    """Thread-safe; each call is short."""

    def __init__(self, l1: L1Store, runners: Sequence[Runner], clock: Clock) -> None:
        self._core = l1.core
        self._runners = runners
        self._clock = clock
        self._lock = threading.Lock()
        self._pins: dict[int, _Pin] = {}
        self._last = 0

    def add(self, keys: Iterable[ObjectKey], owner: str, ttl_seconds: float) -> PinFigures:
        """LMCacheError beyond MAX_PINS and MAX_PINNED_OBJECTS."""
        wanted = list(dict.fromkeys(keys))
        with self._lock:
            self._end_expired()
            if len(self._pins) >= limits.MAX_PINS:
                raise LMCacheError(f"There are {limits.MAX_PINS} pins already; end some before you add others.")
            if self._objects() + len(wanted) > limits.MAX_PINNED_OBJECTS:
                raise LMCacheError(
                    f"All pins together hold at most {limits.MAX_PINNED_OBJECTS} objects; end some pins first."
                )
            self._last += 1
            pin = _Pin(self._last, owner, set(), 0, self._clock.monotonic() + ttl_seconds)
            pin.keys = self._hold(pin, wanted)
            pin.missing = len(wanted) - len(pin.keys)
            if pin.keys:
                self._pins[pin.number] = pin
            return self._figures(pin)

    def remove(self, pin_id: str = "", owner: str = "") -> tuple[int, int]:
        """One pin, or all of an owner: how many pins and objects."""
        with self._lock:
            self._end_expired()
            ended = [pin for pin in self._pins.values() if str(pin.number) == pin_id or (owner and pin.owner == owner)]
            for pin in ended:
                self._end(pin)
            return len(ended), sum(len(pin.keys) for pin in ended)

    def all(self) -> list[PinFigures]:
        with self._lock:
            self._end_expired()
            return [self._figures(pin) for pin in self._pins.values()]

    def end_expired(self) -> None:
        with self._lock:
            self._end_expired()

    def held_in(self, runner: Runner) -> list[ObjectKey]:
        """What pins hold in that adapter, or elsewhere."""
        with self._lock:
            self._end_expired()
            keys = {key for pin in self._pins.values() for key in pin.keys}
        return [key for key, is_known in zip(keys, runner.knows(list(keys)), strict=True) if is_known]

    def let_go(self, keys: Sequence[ObjectKey] | None = None) -> None:
        """These objects, or all, are in no pin any more. The rest of their pins is held all the time."""
        given_up = set(keys) if keys is not None else None
        with self._lock:
            for pin in list(self._pins.values()):
                kept = set() if given_up is None else pin.keys - given_up
                if len(kept) == len(pin.keys):
                    continue
                before = (pin.lease, pin.holds)
                pin.lease, pin.holds = 0, []
                pin.keys = self._hold(pin, list(kept)) if kept else set()
                self._release(*before)
                if not pin.keys:
                    del self._pins[pin.number]

    # ---- with the lock held ------------------------------------------------------------------------------------------
    def _hold(self, pin: _Pin, keys: Sequence[ObjectKey]) -> set[ObjectKey]:
        """Those of which something is held now."""
        held: set[ObjectKey] = set()
        acquired = self._core.acquire_each(PIN_OWNER, *pack_keys(keys), FOREVER)
        pin.lease = acquired.lease
        slots = SlotGrid(acquired.slots, len(keys))
        held.update(key for index, key in enumerate(keys) if slots[0, index] != NO_SLOT)
        for runner in self._runners:
            stored = runner.stored_keys(keys)
            known = runner.ledger.known(stored)
            if any(known):
                pin.holds.append((runner, runner.ledger.hold(stored)))
                held.update(key for key, is_known in zip(keys, known, strict=True) if is_known)
        return held

    def _end(self, pin: _Pin) -> None:
        del self._pins[pin.number]
        self._release(pin.lease, pin.holds)

    def _release(self, lease: int, holds: Sequence[tuple[Runner, LedgerHold]]) -> None:
        if lease:
            self._core.release(lease)
        for runner, hold in holds:
            runner.ledger.let_go(hold)

    def _end_expired(self) -> None:
        now_seconds = self._clock.monotonic()
        for pin in [pin for pin in self._pins.values() if pin.deadline <= now_seconds]:
            self._end(pin)

    def _objects(self) -> int:
        return sum(len(pin.keys) for pin in self._pins.values())

    def _figures(self, pin: _Pin) -> PinFigures:
        remaining_seconds = max(0.0, pin.deadline - self._clock.monotonic())
        return PinFigures(str(pin.number), pin.owner, len(pin.keys), pin.missing, remaining_seconds)
