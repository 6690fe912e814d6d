"""Sends the requests of a workload, so many at once, or at random or recorded times."""

from __future__ import annotations

import asyncio
import collections
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache.cli.engine_bench.completion_client import Asker, Outcome
from lmcache.cli.engine_bench.workloads import Session, Stages

_CANCEL_SECONDS = 0.2
_FAILED_IN_A_ROW = 8  # or as many as are under way at once, where these are more


@dataclass(frozen=True)
class Pace:
    """`rate`: requests a second, at random (Poisson) times; `speed`: times the recorded pace; both 0: the next request
    begins when one ends. `run_seconds` bounds the whole run."""

    concurrency: int
    rate: float
    speed: float
    run_seconds: float
    seed: int


@dataclass
class Measured:
    outcomes: list[Outcome] = field(default_factory=list)
    wall_seconds: float = 0.0
    stopped: str = ""  # why it ended before all was sent
    interrupted: bool = False
    planned: int = 0


class Load:
    def __init__(self, asker: Asker, pace: Pace, told: Callable[[int, int], None] = lambda done, planned: None) -> None:
        """`told` is called with the requests that have ended, and all."""
        self._asker = asker
        self._pace = pace
        self._told = told
        self._times = random.Random(f"{pace.seed} times")
        self._latest: collections.deque[str] = collections.deque(maxlen=max(_FAILED_IN_A_ROW, pace.concurrency))
        self._measured = Measured()
        self._stop = asyncio.Event()
        self._begun = 0.0

    async def run(self, stages: Stages) -> Measured:
        """What was measured, also where the server has gone or somebody pressed Ctrl-C."""
        loop = asyncio.get_running_loop()
        measured = self._measured
        measured.planned = sum(len(session.turns) for stage in stages for session in stage)
        self._begun = loop.time()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        running = asyncio.ensure_future(self._stages(stages))
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            done, _ = await asyncio.wait(
                {running, stopping}, timeout=self._pace.run_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                measured.stopped = f"the run took longer than --max-seconds {self._pace.run_seconds:g}"
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            stopping.cancel()
            self._stop.set()
            await end(running)
        if not running.cancelled() and (error := running.exception()) is not None:
            raise error
        measured.wall_seconds = loop.time() - self._begun
        return measured

    def _interrupt(self) -> None:
        self._measured.stopped, self._measured.interrupted = "it was interrupted", True
        self._stop.set()

    async def _stages(self, stages: Stages) -> None:
        for stage in stages:
            tasks = (
                [asyncio.create_task(self._in_turn(iterator)) for iterator in [iter(stage)] * self._pace.concurrency]
                if not (self._pace.rate or self._pace.speed)
                else self._at_times(stage)
            )
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    async def _in_turn(self, sessions: collections.abc.Iterator[Session]) -> None:
        for session in sessions:
            await self._converse(session, asyncio.get_running_loop().time())

    def _at_times(self, stage: Sequence[Session]) -> list[asyncio.Task[None]]:
        places = asyncio.Semaphore(self._pace.concurrency)
        due = asyncio.get_running_loop().time()

        async def start(session: Session, due: float) -> None:
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            async with places:
                await self._converse(session, due)

        tasks = []
        for session in stage:
            if self._pace.rate:  # of requests, and a session has several
                due += self._times.expovariate(self._pace.rate / len(session.turns))
            else:
                due = self._begun + session.due_seconds / self._pace.speed
            tasks.append(asyncio.create_task(start(session, due)))
        return tasks

    async def _converse(self, session: Session, due: float) -> None:
        answers: list[str] = []
        loop = asyncio.get_running_loop()
        for number, turn in enumerate(session.turns):
            if self._stop.is_set():  # the cancellation may have been lost in the request before this one
                return
            outcome = Outcome(turn.label, loop.time() - self._begun, max(0.0, loop.time() - due))
            self._told(len(self._measured.outcomes), self._measured.planned)
            await self._asker.ask(session, number, answers, outcome)
            self._measured.outcomes.append(outcome)
            self._note(outcome)
            if outcome.error:
                return  # what follows would be another conversation
            answers.append(outcome.text)
            outcome.text = ""
            due = loop.time()

    def _note(self, outcome: Outcome) -> None:
        self._latest.append(outcome.error)
        if len(self._latest) == self._latest.maxlen and all(self._latest):
            self._measured.stopped = f"the last {len(self._latest)} requests all failed"
            self._stop.set()


async def end(task: asyncio.Future[Any]) -> None:
    """Cancels until it has ended: before Python 3.12 asyncio.wait_for may lose a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_SECONDS)
