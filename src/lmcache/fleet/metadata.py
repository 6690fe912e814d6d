"""What operators decided and what must outlive a coordinator: quotas and pins, in a file of JSON. Its format is
docs/formats/fleet-checkpoint.md."""

from __future__ import annotations

import hashlib
import threading
from typing import BinaryIO

import msgspec

from lmcache.core import limits
from lmcache.errors import ConfigError, LMCacheError
from lmcache.fleet import saved_file

VERSION = 1
_MOST_BYTES = 1 << 30


class FleetPin(msgspec.Struct):
    """Names NAMESPACE/HASH of objects that no server is to evict until then."""

    pin_id: str
    owner: str
    names: list[str]
    instance_id: str  # "": every server that has a copy
    ends_at: float  # seconds since 1970-01-01 UTC


class Decisions(msgspec.Struct):
    """`quotas`: bytes by salt. `ended_quotas`: salts that had one and have none any more, the latest to end last."""

    quotas: dict[str, int] = {}
    pins: dict[str, FleetPin] = {}
    ended_quotas: list[str] = []  # an addition


class _File(msgspec.Struct):
    version: int
    sha256: str
    content: msgspec.Raw


class Metadata:
    """Thread-safe. Without a path nothing outlives the coordinator."""

    def __init__(self, path: str) -> None:
        """What is damaged is kept under another name, and nothing is known."""
        self._path = path
        self._lock = threading.Lock()
        self._decisions = Decisions()
        if path:
            saved_file.read_or_move_aside(path, "file of --metadata-path", self._read)

    def _read(self, file: BinaryIO) -> None:
        try:
            saved = msgspec.json.decode(file.read(_MOST_BYTES), type=_File)
            if saved.version != VERSION:
                raise ConfigError(f"it is of version {saved.version}, and this coordinator reads version {VERSION}.")
            content = bytes(saved.content)
            if hashlib.sha256(content).hexdigest() != saved.sha256:
                raise ConfigError("its checksum is not that of its content.")
            self._decisions = msgspec.json.decode(content, type=Decisions)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ConfigError("it is no file of pins and quotas.") from None

    # ---- quotas ------------------------------------------------------------------------------------------------------
    def quotas(self) -> dict[str, int]:
        with self._lock:
            return dict(self._decisions.quotas)

    def quota_of(self, salt: str) -> int | None:
        with self._lock:
            return self._decisions.quotas.get(salt)

    def ended_quotas(self) -> list[str]:
        """Salts that had a quota and have none any more, of the latest MAX_FLEET_ENDED_QUOTAS."""
        with self._lock:
            return list(self._decisions.ended_quotas)

    def set_quota(self, salt: str, limit_bytes: int | None) -> None:
        """None: it has none any more. LMCacheError: nothing has changed."""
        with self._lock:
            quotas = dict(self._decisions.quotas)
            ended = [name for name in self._decisions.ended_quotas if name != salt]
            if limit_bytes is None:
                quotas.pop(salt, None)
                ended = [*ended, salt][-limits.MAX_FLEET_ENDED_QUOTAS :]
            else:
                quotas[salt] = limit_bytes
            if len(quotas) > limits.MAX_QUOTAS:
                raise LMCacheError(f"{limits.MAX_QUOTAS} salts have a quota; no other one can.")
            self._replace(Decisions(quotas, self._decisions.pins, ended))

    # ---- pins --------------------------------------------------------------------------------------------------------
    def pins(self, at: float) -> list[FleetPin]:
        """Those that have not ended then, in seconds since 1970-01-01 UTC."""
        with self._lock:
            return [pin for pin in self._decisions.pins.values() if pin.ends_at > at]

    def has_pin(self, pin_id: str, at: float) -> bool:
        """Whether there is one of that id that has not ended."""
        with self._lock:
            pin = self._decisions.pins.get(pin_id)
            return pin is not None and pin.ends_at > at

    def add_pin(self, pin: FleetPin, at: float) -> None:
        """LMCacheError: nothing has changed."""
        with self._lock:
            pins = {name: known for name, known in self._decisions.pins.items() if known.ends_at > at}
            if len(pins) >= limits.MAX_FLEET_PINS:
                raise LMCacheError(f"There are {limits.MAX_FLEET_PINS} pins; end some before others begin.")
            if sum(len(known.names) for known in pins.values()) + len(pin.names) > limits.MAX_PINNED_OBJECTS:
                raise LMCacheError(
                    f"Pins hold at most {limits.MAX_PINNED_OBJECTS} objects; end some before others begin."
                )
            self._replace_pins({**pins, pin.pin_id: pin})

    def remove_pins(self, pin_id: str, owner: str) -> list[FleetPin]:
        """Those that have ended."""
        with self._lock:
            gone = [pin for pin in self._decisions.pins.values() if pin_id == pin.pin_id or owner == pin.owner]
            if gone:
                ended = {pin.pin_id for pin in gone}
                self._replace_pins({name: pin for name, pin in self._decisions.pins.items() if name not in ended})
            return gone

    # ---- with the lock held ------------------------------------------------------------------------------------------
    def _replace_pins(self, pins: dict[str, FleetPin]) -> None:
        self._replace(Decisions(self._decisions.quotas, pins, self._decisions.ended_quotas))

    def _replace(self, decisions: Decisions) -> None:
        if self._path:
            content = msgspec.json.encode(decisions)
            saved = _File(VERSION, hashlib.sha256(content).hexdigest(), msgspec.Raw(content))
            saved_file.replace(self._path, lambda file: (file.write(msgspec.json.encode(saved)), None)[1])
        self._decisions = decisions
