"""What passes through the layers: one operation on an adapter, with a deadline that it may outlive.

Invariant: what the caller lent to an operation (buffers under leases or reservations, a place among those that run at
once) is given back once, when the operation has really ended - not when the caller stopped waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

from lmcache.core.key import ObjectKey

T = TypeVar("T")

Start: TypeAlias = Callable[[], Coroutine[Any, Any, T]]


class SharedRelease:
    """Calls its callbacks, the last one first, when every user is done. Starts with one user, its creator."""

    __slots__ = ("_callbacks", "_users")

    def __init__(self, *callbacks: Callable[[], None]) -> None:
        self._callbacks = list(callbacks)
        self._users = 1

    def on_release(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def add_user(self) -> None:
        assert self._users > 0
        self._users += 1

    def done(self) -> None:
        self._users -= 1
        if self._users == 0:
            while self._callbacks:
                self._callbacks.pop()()


@dataclass(slots=True, eq=False)
class Operation:
    """`forced`: it runs although its direction is suspended, and its success does not end that.
    `trial`: started instead of it, and awaited by nobody, when it is time to see whether a suspended direction works
    again. Without one the operation itself is the trial."""

    deadline: float  # in the loop's time
    lent: SharedRelease = field(default_factory=SharedRelease)
    forced: bool = False
    trial: Start[object] | None = None


@dataclass(slots=True, eq=False)
class Batch:
    """Objects of one store or load. Lists of numbers are indices into it, ascending."""

    keys: Sequence[ObjectKey]
    buffers: Sequence[memoryview]

    def __len__(self) -> int:
        return len(self.keys)

    def pick(self, indices: Sequence[int]) -> Batch:
        if len(indices) == len(self.keys):
            return self
        return Batch([self.keys[index] for index in indices], [self.buffers[index] for index in indices])


class CallLayer(Protocol):
    """A layer to which all calls of an adapter are alike. The others (`SerdeLayer`, `CapacityLayer`) have the
    methods of the adapter contract, each with an `Operation` beside its arguments."""

    async def run(self, start: Start[T], operation: Operation) -> T:
        """What `start()` returns. AdapterError, whatever went wrong. Who calls it is one of the users of
        `operation.lent`; what is started is another one until it ends."""
        ...
