"""Threads with a NIXL agent each: transfers are posted and polled there, one at a time an agent, never on the loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from lmcache.errors import AdapterError, ResourceError
from lmcache.l2.adapters.nixl_agent import Agent, AgentSettings
from lmcache.l2.call_threads import CallThreads

T = TypeVar("T")

READ_LANES = 4  # while the transfer of one agent ends, others have begun
WRITE_LANES = 1


class Lanes:
    """Construct on the loop that uses it."""

    def __init__(self, name: str, settings: AgentSettings, lanes: int) -> None:
        self._settings = settings
        self._own = threading.local()
        self._threads = CallThreads(name, lanes, at_end=self._close_agent)

    async def open(self) -> None:
        """ResourceError where the backend cannot be used."""
        await self.open_with(lambda _: None)

    async def open_with(self, call: Callable[[Agent], T]) -> T:
        """Calls like `run`, but for ResourceErrors, which pass."""
        return await self._threads.run(lambda: call(self._usable_agent()))

    async def run(self, call: Callable[[Agent], T]) -> T:
        """Calls it on one of the threads. Ends when the call has ended and never before that, also when it is
        cancelled: until then what `call` was lent is in use. AdapterError where the backend does not open again."""
        try:
            return await self.open_with(call)
        except ResourceError as error:
            raise AdapterError(str(error), retryable=True) from None

    async def close(self) -> None:
        """Waits for everything that was begun. Idempotent."""
        await self._threads.close()

    # ---- the agent of a thread ---------------------------------------------------------------------------------------
    def _usable_agent(self) -> Agent:
        agent: Agent | None = getattr(self._own, "agent", None)
        if agent is None or not agent.is_open:
            agent = self._own.agent = Agent(self._settings)
        return agent

    def _close_agent(self) -> None:
        agent: Agent | None = getattr(self._own, "agent", None)
        if agent is not None:
            agent.close()
