"""So many calls at once, abandoned ones included: a backend that hangs does not collect buffers without end."""

from __future__ import annotations

from lmcache.errors import AdapterError, DeadlineError
from lmcache.l2.layers.operation import CallLayer, Operation, SharedRelease, Start, T
from lmcache.l2.turns import Turns


class ConcurrencyLimit:
    def __init__(self, adapter_name: str, max_running: int, inner: CallLayer) -> None:
        self._adapter_name = adapter_name
        self._inner = inner
        self._turns = Turns(max_running)
        self.is_closed = False  # nothing begins any more, neither what waited for its turn nor what is tried again

    async def run(self, start: Start[T], operation: Operation) -> T:
        if not await self._turns.acquire(operation.deadline):
            raise DeadlineError(f"{self._adapter_name}: no operation ended in time to start another one")
        if self.is_closed:
            self._turns.release()
            raise AdapterError(f"{self._adapter_name}: it is being closed")
        operation.lent.add_user()
        lent = SharedRelease(operation.lent.done, self._turns.release)
        try:
            return await self._inner.run(start, Operation(operation.deadline, lent))
        finally:
            lent.done()
