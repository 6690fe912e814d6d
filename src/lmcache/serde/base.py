"""What a serde is made of. Each stage turns a payload into another one and back; a chain is the stages in order.

Stages are native (native/include/lmcache/serde_stage.h) and run on threads of the layer that owns them
(l2/layers/serde.py), several objects at once. docs/how-to/write-a-serde.md is a guide to one in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from lmcache import _native
from lmcache.core.key import MAX_SERDE_NAME_CHARACTERS, ObjectKey
from lmcache.errors import ConfigError

MAX_STAGES = 8
SEPARATOR = ","  # between the stages of a chain

SmallestSaving = Annotated[
    float,
    Meta(ge=0, le=0.9, description="objects of which a sample saves less than this fraction are stored as they are"),
]


class SerdeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of every serde type; a type adds its own in a subclass."""

    type: Annotated[str, Meta(min_length=1, description="the serde type")]


class Serde(Protocol):
    """A serde type of your own. Its methods are called by several threads at once.

    `name` is written into each frame: a frame that another name wrote is a miss. Change it when the format changes.
    `lossy`: what is decoded is not exactly what was encoded."""

    name: str
    lossy: bool

    def max_encoded_bytes(self, source_bytes: int) -> int:
        """The most that `encode` writes for a source of that size."""
        ...

    def encode(self, source: memoryview, destination: memoryview, key: ObjectKey) -> int | None:
        """Returns how many bytes it wrote to the beginning of `destination`, which has `max_encoded_bytes`. None: there
        is nothing to gain, and the source is stored as it is. Source and destination end with the call."""
        ...

    def decode(self, source: memoryview, destination: memoryview, key: ObjectKey) -> None:
        """Fills `destination`, which has the size of what was encoded. ValueError: the source is not what `encode`
        wrote, and is moved aside. After another exception it stays. The source may be anything."""
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """`name` as in frames, without commas. `refresh` takes settings that changed while the server runs; it may block,
    and raises nothing."""

    name: str
    native: _native.SerdeStage
    refresh: Callable[[], None] | None = None


class Chain:
    """Stages in the order in which they encode. Names what it stores, and is a part of the namespace there.

    `lossy` is the name of the stage that gives back something near what was stored, "" where all are exact."""

    def __init__(self, stages: Sequence[Stage], where: str) -> None:
        """ConfigError begins with `where`."""
        self.name = SEPARATOR.join(stage.name for stage in stages)
        self.lossy = stages[0].name if stages[0].native.is_lossy else ""
        self._refreshes = [stage.refresh for stage in stages if stage.refresh is not None]
        if late := [stage.name for stage in stages[1:] if stage.native.is_lossy]:
            raise ConfigError(
                f'{where}: the "serde" type {late[0]!r} is lossy and must be the first of the list: it takes KV as the '
                "engine made it."
            )
        if len(self.name) > MAX_SERDE_NAME_CHARACTERS:
            raise ConfigError(
                f'{where}: the names of all "serde" types, {self.name!r}, have {len(self.name)} characters together, '
                f"and a frame has room for {MAX_SERDE_NAME_CHARACTERS}; use fewer of them."
            )
        self.native = _native.SerdeChain(self.name, [stage.native for stage in stages])

    @property
    def may_change(self) -> bool:
        """Whether there is something to `refresh`."""
        return bool(self._refreshes)

    def refresh(self) -> None:
        """One thread at a time; may block."""
        for refresh in self._refreshes:
            refresh()
