"""Threads and what they wait for, under the simulation's time: the part of `threading` and `queue` that is used."""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable
from typing import Any

from lmcache.client.engine_environment import EngineEnvironment
from simulation.world import Turn, World


def engine_environment(world: World, connection: Callable[..., Any], copier: Callable[..., Any]) -> EngineEnvironment:
    def in_world(made: Callable[..., Any]) -> Any:
        return functools.partial(made, world)

    return EngineEnvironment(
        clock=world,
        random_bytes=world.random.randbytes,
        thread=in_world(SimThread),
        lock=in_world(SimLock),
        condition=in_world(SimCondition),
        event=in_world(SimEvent),
        queue=in_world(SimQueue),
        connection=connection,
        copier=copier,
    )


def _seconds(timeout: float | None) -> float:
    return float("inf") if timeout is None else timeout


class SimThread:
    def __init__(self, world: World, target: Callable[[], None], name: str, daemon: bool) -> None:
        self._world, self._target, self._name = world, target, name
        self._turn: Turn | None = None

    def start(self) -> None:
        self._turn = self._world.start_thread(self._target, self._name)

    def is_alive(self) -> bool:
        return self._turn is not None and not self._turn.ended

    def join(self, timeout: float | None = None) -> None:
        self._world.block(lambda: not self.is_alive(), _seconds(timeout))


class SimLock:
    def __init__(self, world: World) -> None:
        self._world = world
        self.held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        free = self._world.block(lambda: not self.held, float("inf") if blocking and timeout < 0 else timeout)
        if free:
            self.held = True
        return free

    def release(self) -> None:
        assert self.held
        self.held = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


class SimCondition:
    def __init__(self, world: World) -> None:
        self._world = world
        self._lock = SimLock(world)

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def notify(self) -> None:
        """Those that wait look by themselves."""

    notify_all = notify

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        self._lock.release()
        self._world.block(lambda: not self._lock.held and bool(predicate()), _seconds(timeout))
        self._lock.acquire()
        return predicate()


class SimEvent:
    def __init__(self, world: World) -> None:
        self._world = world
        self._set = False

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        return self._world.block(lambda: self._set, _seconds(timeout))


class SimQueue:
    def __init__(self, world: World) -> None:
        self._world = world
        self._items: list[Any] = []

    def put(self, item: Any) -> None:
        self._items.append(item)

    def empty(self) -> bool:
        return not self._items

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._world.block(lambda: bool(self._items), _seconds(timeout)):
            raise queue.Empty
        return self._items.pop(0)
