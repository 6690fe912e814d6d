"""Suspends one direction (loads or stores) of a backend that fails, and finds out when it works again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError, DeadlineError
from lmcache.l2.circuit_breaker import CircuitBreaker
from lmcache.l2.layers.operation import CallLayer, Operation, Start, T

log = logging.getLogger("lmcache.l2")

_FAILED = (StoreOutcome.FAILED, LoadOutcome.FAILED)


class BreakerLayer:
    def __init__(
        self,
        direction: str,
        adapter_name: str,
        circuit: CircuitBreaker,
        on_change: Callable[[], None],
        inner: CallLayer,
    ) -> None:
        """`direction`: "loads" or "stores". `on_change` is called when it was suspended or goes on."""
        self.trials: set[asyncio.Task[None]] = set()
        self._direction = direction
        self._adapter_name = adapter_name
        self._circuit = circuit
        self._on_change = on_change
        self._inner = inner

    @property
    def is_suspended(self) -> bool:
        return self._circuit.is_open

    @property
    def state(self) -> int:
        """0: operations pass, 1: suspended, 2: suspended, and a trial is due or runs."""
        if not self._circuit.is_open:
            return 0
        return 2 if self._circuit.trial_runs or self._circuit.would_admit else 1

    @property
    def would_admit(self) -> bool:
        """Whether an operation that begins now would run, as one of many or as the trial."""
        return self._circuit.would_admit

    async def run(self, start: Start[T], operation: Operation) -> T:
        """A fault that cost a whole deadline suspends at once; others when they come in a row. A batch of which every
        object failed is a fault."""
        if not operation.forced:
            self._admit(operation)
        try:
            result = await self._inner.run(start, operation)
        except AdapterError as error:
            self._fail(str(error), at_once=isinstance(error, DeadlineError))
            raise
        if isinstance(result, list) and result and all(outcome in _FAILED for outcome in result):
            self._fail("every object of a batch failed")
        elif not operation.forced:
            self.resume()
        return result

    def resume(self) -> None:
        """The backend did what it should."""
        if self._circuit.succeeded():
            log.info("%s: %s go on", self._adapter_name, self._direction)
            self._on_change()

    def _admit(self, operation: Operation) -> None:
        """AdapterError while suspended. A trial that nobody waits for may begin meanwhile."""
        admitted = self._circuit.admits()
        if admitted and not (self._circuit.is_open and operation.trial):
            return
        if admitted and operation.trial:
            task = asyncio.get_running_loop().create_task(self._try(operation.trial, operation.deadline))
            self.trials.add(task)
            task.add_done_callback(self.trials.discard)
        raise AdapterError(f"{self._adapter_name}: {self._direction} are suspended after faults")

    async def _try(self, trial: Start[object], deadline: float) -> None:
        try:
            await self.run(trial, Operation(deadline, forced=True))
        except AdapterError:
            return
        self.resume()

    def _fail(self, reason: str, *, at_once: bool = False) -> None:
        if self._circuit.failed(at_once=at_once):
            log.warning(
                "%s: %s are suspended for %.0f s after faults, the last: %s",
                self._adapter_name,
                self._direction,
                self._circuit.open_seconds,
                reason.removeprefix(f"{self._adapter_name}: "),
            )
            self._on_change()
