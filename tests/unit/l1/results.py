"""What the calls of L1Core return, as tuples: shorter to compare."""

from __future__ import annotations

from typing import Any

from lmcache import _native

_FIELDS: dict[type, tuple[str, ...]] = {
    _native.Acquired: ("lease", "chunks", "slots"),
    _native.Reserved: ("reservation", "slots", "chunks_without_room"),
    _native.Committed: ("objects", "lease", "records"),
    _native.CommitRecord: ("namespace", "chunk", "slot", "size_bytes"),
    _native.EndedClaims: ("leases", "reservations"),
    _native.Removed: ("objects", "size_bytes"),
    _native.Overuse: ("salt", "limit_bytes"),
}


def values(result: object) -> tuple[Any, ...]:
    found = tuple(getattr(result, field) for field in _FIELDS[type(result)])
    return tuple([values(element) for element in value] if isinstance(value, list) else value for value in found)
