"""Objects that no server is to evict, wherever a copy is when they are pinned; a server that joins later holds what it
has of them.

A server that has joined, or that could not be asked when something changed, is made equal to what was decided: what its
pins of this fleet are is looked at, those that are current are made anew, the others end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache.clock import Clock
from lmcache.core.limits import MAX_HTTP_KEYS
from lmcache.errors import LMCacheError
from lmcache.fleet.metadata import FleetPin, Metadata
from lmcache.fleet.server_sync import ServerSync
from lmcache.fleet.servers import Servers
from lmcache.http.client import HttpRefused

_PATH = "/cache/pins"
_OWNER_PREFIX = "fleet:"


@dataclass
class PinState:
    """How many copies of one pin each server holds, and why others could not be asked."""

    held: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)  # servers that were told of it since their pins were looked at


@dataclass(frozen=True)
class Ended:
    """How many pins have ended, and how many copies they held. Servers that are `behind` hold them until they can be
    asked."""

    pins: int
    objects: int
    behind: Sequence[str]


class FleetPins:
    """Thread-safe. `push` is called again and again, and never waits."""

    def __init__(
        self, metadata: Metadata, servers: Servers, clock: Clock, random_bytes: Callable[[int], bytes]
    ) -> None:
        self._metadata = metadata
        self._servers = servers
        self._clock = clock
        self._random_bytes = random_bytes
        self._lock = threading.Lock()
        self._states: dict[str, PinState] = {}  # of pins that have not ended, or not for long
        self._turns: dict[str, threading.Lock] = {}  # by server, held while it is told of a pin
        self._sync = ServerSync("pins", self._make_equal, clock)

    # ---- decisions ---------------------------------------------------------------------------------------------------
    def add(
        self, names: dict[str, list[str]], owner: str, instance_id: str, ttl_seconds: float
    ) -> tuple[FleetPin, PinState]:
        """`names`: NAMESPACE/HASH by server. It counts what the servers hold; LMCacheError: there is no pin."""
        wall = self._clock.wall()
        every = list(dict.fromkeys(name for some in names.values() for name in some))
        pin = FleetPin(self._random_bytes(8).hex(), owner, every, instance_id, wall + ttl_seconds)
        self._metadata.add_pin(pin, wall)
        answers = self._servers.run_each(names, lambda name: self._hold(pin, name, names[name]))
        for name, reason in answers.failed.items():
            self._note_failed(pin, name, reason)
        self._sync.note(answers.failed)
        return pin, self._state_of(pin.pin_id)

    def all(self) -> list[tuple[FleetPin, PinState]]:
        return [(pin, self._state_of(pin.pin_id)) for pin in self._metadata.pins(self._clock.wall())]

    def remaining_seconds(self, pin: FleetPin) -> float:
        return max(0.0, pin.ends_at - self._clock.wall())

    def remove(self, pin_id: str, owner: str) -> Ended:
        """LMCacheError: nothing has ended."""
        gone = self._metadata.remove_pins(pin_id, owner)
        held: dict[str, list[str]] = {}  # pins by server
        objects = 0
        with self._lock:
            for pin in gone:
                state = self._states.pop(pin.pin_id, PinState())
                objects += sum(state.held.values())
                for name in state.held:
                    held.setdefault(name, []).append(pin.pin_id)
        answers = self._servers.run_each(held, lambda name: self._end(name, held[name]))
        self._sync.note(answers.failed)
        return Ended(len(gone), objects, sorted(answers.failed))

    # ---- servers -----------------------------------------------------------------------------------------------------
    def joined(self, instance_id: str) -> None:
        self._sync.note([instance_id])

    def left(self, instance_id: str) -> None:
        self._sync.forget(instance_id)
        with self._lock:
            self._turns.pop(instance_id, None)
            for state in self._states.values():
                state.held.pop(instance_id, None)
                state.failed.pop(instance_id, None)
                state.made.discard(instance_id)

    def push(self) -> None:
        """Begins to tell servers that have joined, or could not be asked, what they are to hold."""
        with self._lock:  # a pin is decided before it has a state
            current = {pin.pin_id for pin in self._metadata.pins(self._clock.wall())}
            for ended in self._states.keys() - current:
                del self._states[ended]
        self._sync.step()

    def behind(self) -> set[str]:
        """Servers that do not hold yet what they are to hold."""
        return self._sync.behind()

    def close(self) -> None:
        self._sync.close()

    def _make_equal(self, instance_id: str) -> None:
        """LMCacheError where that server could not be asked, or refused some of it. The rest of it is told."""
        if not self._servers.knows(instance_id):  # it has left, and was noted afterwards
            return
        with self._lock:
            for state in self._states.values():
                state.made.discard(instance_id)
        before, known = self._servers.read(instance_id, _of_fleet, "GET", _PATH)
        pins = [pin for pin in self._metadata.pins(self._clock.wall()) if pin.instance_id in ("", instance_id)]
        for owner in before.keys() - {_owner(pin.pin_id) for pin in pins}:
            self._servers.ask(instance_id, "DELETE", _PATH, {"owner": owner})
        refusal: HttpRefused | None = None
        for pin in pins:
            try:
                made = self._hold(pin, instance_id, pin.names)
                if made is None:  # by `add`, with the names that were known of this server
                    self._sync.note([instance_id])
                    continue
                if not known.isdisjoint(made):  # it was started anew and counts from one: these are others by now
                    before = {}
                for pin_id in before.get(_owner(pin.pin_id), ()) if made else ():
                    self._servers.ask(instance_id, "DELETE", _PATH, {"pin_id": pin_id})
            except LMCacheError as error:
                self._note_failed(pin, instance_id, str(error))
                if not isinstance(error, HttpRefused):
                    raise
                refusal = error
        if refusal is not None:
            raise refusal

    def _hold(self, pin: FleetPin, instance_id: str, names: Sequence[str]) -> list[str] | None:
        """The ids of the server's pins that were made for it. None: another thread has just made them: of two, each
        copy would be held twice."""
        with self._lock:
            turn = self._turns.setdefault(instance_id, threading.Lock())
        with turn:
            if not self._is_current(pin):
                return []
            with self._lock:
                if instance_id in self._states.get(pin.pin_id, PinState()).made:
                    return None
            held, made = 0, []
            for first in range(0, len(names), MAX_HTTP_KEYS):
                body = {
                    "keys": list(names[first : first + MAX_HTTP_KEYS]),
                    "owner": _owner(pin.pin_id),
                    "ttl_seconds": max(1.0, self.remaining_seconds(pin)),
                }
                objects, pin_id = self._servers.read(instance_id, _made, "POST", _PATH, body)
                held += objects
                made.append(pin_id)
            self._note_made(pin, instance_id, held)
        if not self._is_current(pin):  # it has ended meanwhile, and this server was not known to hold any of it
            self._sync.note([instance_id])
        return made

    def _note_made(self, pin: FleetPin, instance_id: str, held: int) -> None:
        with self._lock:
            state = self._states.setdefault(pin.pin_id, PinState())
            state.failed.pop(instance_id, None)
            if self._servers.knows(instance_id):
                state.made.add(instance_id)
                state.held.pop(instance_id, None)
                if held:
                    state.held[instance_id] = held

    def _end(self, instance_id: str, pin_ids: Sequence[str]) -> None:
        for pin_id in pin_ids:
            self._servers.ask(instance_id, "DELETE", _PATH, {"owner": _owner(pin_id)})

    def _is_current(self, pin: FleetPin) -> bool:
        return self._metadata.has_pin(pin.pin_id, self._clock.wall())

    def _note_failed(self, pin: FleetPin, instance_id: str, reason: str) -> None:
        with self._lock:
            if self._servers.knows(instance_id):
                self._states.setdefault(pin.pin_id, PinState()).failed[instance_id] = reason

    def _state_of(self, pin_id: str) -> PinState:
        """Returns a copy of the pin's state."""
        with self._lock:
            state = self._states.get(pin_id, PinState())
            return PinState(dict(state.held), dict(state.failed))


def _made(answer: Any) -> tuple[int, str]:
    """How many objects that pin holds, and its id."""
    return int(answer["objects"]), str(answer["pin_id"])


def _of_fleet(answer: Any) -> tuple[dict[str, list[str]], set[str]]:
    """The ids of its pins by owner, of those that a coordinator made; and the ids of all."""
    found: dict[str, list[str]] = {}
    for pin in answer["pins"]:
        if str(pin["owner"]).startswith(_OWNER_PREFIX):
            found.setdefault(str(pin["owner"]), []).append(str(pin["pin_id"]))
    return found, {str(pin["pin_id"]) for pin in answer["pins"]}


def _owner(pin_id: str) -> str:
    return f"{_OWNER_PREFIX}{pin_id}"
