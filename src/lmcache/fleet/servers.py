"""Asks servers of the fleet, over the HTTP interface that each of them has."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lmcache.core.limits import MAX_FLEET_ANSWER_BYTES
from lmcache.errors import LMCacheError, ServerUnavailable
from lmcache.fleet.instances import Instance, Instances, digest_of
from lmcache.http.client import answer_of, request

logger = logging.getLogger("lmcache.fleet")

ASK_SECONDS = 10.0
_THREADS = 16
_CLOSED = "The coordinator is shutting down."

T = TypeVar("T")


@dataclass
class Answers:
    """What each of several servers said, or why it could not be asked."""

    values: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Servers:
    """Thread-safe. A server gets the admin token only where it joined with that one."""

    def __init__(self, instances: Instances, token: Callable[[], str]) -> None:
        self._instances = instances
        self._token = token
        self._closed = threading.Event()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="fleet-servers")

    def close(self) -> None:
        """Requests under way go on to their end; no other one begins."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def knows(self, instance_id: str) -> bool:
        """Whether it has joined."""
        return self._instances.knows(instance_id)

    def ask(self, instance_id: str, method: str, path: str, body: Any = None) -> Any:
        """LMCacheError: it has not joined, does not answer in time, or refuses; or this is closed."""
        if self._closed.is_set():
            raise ServerUnavailable(_CLOSED)
        return self._ask(self._instances.find(instance_id), method, path, body)

    def _ask(self, instance: Instance, method: str, path: str, body: Any) -> Any:
        token = self._token()
        if not instance.has_token or digest_of(token) != instance.token_digest:
            token = ""
        return request(
            *(instance.url, method, path, body),
            token=token,
            timeout_seconds=ASK_SECONDS,
            most_answer_bytes=MAX_FLEET_ANSWER_BYTES,
        )

    def read(self, instance_id: str, read: Callable[[Any], T], method: str, path: str, body: Any = None) -> T:
        """What `read` makes of the answer. ServerUnavailable where that is not what a server answers."""
        answer = self.ask(instance_id, method, path, body)
        with answer_of(instance_id):
            return read(answer)

    def run_each(self, instance_ids: Iterable[str], work: Callable[[str], Any]) -> Answers:
        """Side by side, for each server. `work` raises LMCacheError where it fails."""
        answers = Answers()
        try:
            futures = {name: self._threads.submit(work, name) for name in instance_ids}
        except RuntimeError:
            raise ServerUnavailable(_CLOSED) from None
        seconds = ASK_SECONDS * (2 + len(futures) // _THREADS)
        done, _ = wait(futures.values(), seconds)
        for name, future in futures.items():
            if future not in done:
                future.cancel()
                answers.failed[name] = f"{name} did not end its part of this within {seconds:g} s."
                continue
            try:
                answers.values[name] = future.result()
            except LMCacheError as error:
                answers.failed[name] = str(error)
        return answers
