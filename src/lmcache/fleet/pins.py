"""Objects that no server is to evict, wherever a copy is when they are pinned; a server that joins later holds what it
has of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache.clock import Clock
from lmcache.core.limits import MAX_HTTP_KEYS
from lmcache.errors import LMCacheError
from lmcache.fleet.metadata import FleetPin, Metadata
from lmcache.fleet.servers import Servers
from lmcache.telemetry.log_limiter import LogLimiter

logger = logging.getLogger("lmcache.fleet")

_LOG_SECONDS = 60.0
_PATH = "/cache/pins"


@dataclass
class PinState:
    """Of one pin: copies that each server holds, and why others could not be asked."""

    held: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class FleetPins:
    """Thread-safe. `push` is called again and again."""

    def __init__(
        self, metadata: Metadata, servers: Servers, clock: Clock, random_bytes: Callable[[int], bytes]
    ) -> None:
        self._metadata = metadata
        self._servers = servers
        self._clock = clock
        self._random_bytes = random_bytes
        self._lock = threading.Lock()
        self._states: dict[str, PinState] = {}
        self._newcomers: set[str] = set()
        self._limiter = LogLimiter(_LOG_SECONDS, clock)

    def add(
        self, names: dict[str, list[str]], owner: str, instance_id: str, ttl_seconds: float
    ) -> tuple[FleetPin, PinState]:
        """`names`: NAMESPACE/HASH by server. It counts what the servers hold; LMCacheError: there is no pin."""
        now = self._clock.wall()
        every = list(dict.fromkeys(name for some in names.values() for name in some))
        pin = FleetPin(self._random_bytes(8).hex(), owner, every, instance_id, now + ttl_seconds)
        self._metadata.add_pin(pin, now)
        state = self._states_of(pin)
        self._hold(pin, state, names)
        return pin, state

    def all(self) -> list[tuple[FleetPin, PinState]]:
        pins = self._metadata.pins(self._clock.wall())
        with self._lock:
            current = {pin.pin_id for pin in pins}
            for ended in set(self._states) - current:
                del self._states[ended]
        return [(pin, self._states_of(pin)) for pin in pins]

    def remaining_seconds(self, pin: FleetPin) -> float:
        return max(0.0, pin.ends_at - self._clock.wall())

    def remove(self, pin_id: str, owner: str) -> tuple[int, int]:
        """How many pins have ended, and how many copies they held. LMCacheError where a server that holds some could
        not be asked: there the pin ends by its time."""
        gone = self._metadata.remove_pins(pin_id, owner)
        objects = 0
        failed: dict[str, str] = {}
        for pin in gone:
            with self._lock:
                state = self._states.pop(pin.pin_id, PinState())
            objects += sum(state.held.values())
            answers = self._servers.ask_each("DELETE", _PATH, {name: {"owner": _owner(pin)} for name in state.held})
            failed.update(answers.failed)
        if failed:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
            raise LMCacheError(f"Not every server could be asked, and holds its copies until the pin's time: {reasons}")
        return len(gone), objects

    def joined(self, instance_id: str) -> None:
        with self._lock:
            self._newcomers.add(instance_id)

    def left(self, instance_id: str) -> None:
        with self._lock:
            self._newcomers.discard(instance_id)
            for state in self._states.values():
                state.held.pop(instance_id, None)
                state.failed.pop(instance_id, None)

    def push(self) -> None:
        """Servers that have joined hold what they have of the pins."""
        with self._lock:
            newcomers, self._newcomers = self._newcomers, set()
        for pin in self._metadata.pins(self._clock.wall()) if newcomers else ():
            wanted = [name for name in newcomers if pin.instance_id in ("", name)]
            failed = self._hold(pin, self._states_of(pin), dict.fromkeys(wanted, pin.names))
            with self._lock:
                self._newcomers.update(failed)  # until it answers, or has left

    def _hold(self, pin: FleetPin, state: PinState, names: dict[str, list[str]]) -> list[str]:
        """Which servers could not be asked."""
        answers = self._servers.run_each(names, lambda instance_id: self._ask(pin, instance_id, names[instance_id]))
        with self._lock:
            state.held.update({name: held for name, held in answers.values.items() if held})
            state.failed.update(answers.failed)
        for name, reason in answers.failed.items():
            if self._limiter.due():
                logger.warning("%s does not hold the objects of a pin: %s", name, reason)
        return list(answers.failed)

    def _ask(self, pin: FleetPin, instance_id: str, names: Sequence[str]) -> int:
        """How many copies it holds. Pins of the same that it had before end, once these are there."""
        held, made = 0, set()
        for first in range(0, len(names), MAX_HTTP_KEYS):
            body = {
                "keys": list(names[first : first + MAX_HTTP_KEYS]),
                "owner": _owner(pin),
                "ttl_seconds": max(1.0, self.remaining_seconds(pin)),
            }
            pin_id, objects = self._servers.read(
                instance_id, lambda answer: (str(answer["pin_id"]), int(answer["objects"])), "POST", _PATH, body
            )
            made.add(pin_id)
            held += objects
        for known in self._servers.read(instance_id, lambda answer: _of_owner(answer, _owner(pin)), "GET", _PATH):
            if known not in made:
                self._servers.ask(instance_id, "DELETE", _PATH, {"pin_id": known})
        return held

    def _states_of(self, pin: FleetPin) -> PinState:
        with self._lock:
            return self._states.setdefault(pin.pin_id, PinState())


def _of_owner(answer: Any, owner: str) -> list[str]:
    return [str(pin["pin_id"]) for pin in answer["pins"] if pin["owner"] == owner]


def _owner(pin: FleetPin) -> str:
    return f"fleet:{pin.pin_id}"
