"""Encodes and decodes batches of frames on native threads."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from lmcache import _native
from lmcache.core.key import ObjectKey
from lmcache.l2.completions import Completions
from lmcache.l2.layers.context import AdapterContext
from lmcache.l2.layers.operation import Operation
from lmcache.l2.layers.serde_log import SerdeLog
from lmcache.l2.layers.serde_namespaces import StoredNamespaces
from lmcache.serde.base import Chain

REFRESH_SECONDS = 5.0  # between two looks at settings that may change


class CodedFrames(NamedTuple):
    """What became of each frame of a batch: its bytes, 0 with a fault."""

    sizes_bytes: Sequence[int]
    faults: bytes


def default_threads() -> int:
    return max(1, min(4, len(os.sched_getaffinity(0)) // 4))


class SerdeQueue:
    def __init__(self, context: AdapterContext, chain: Chain, namespaces: StoredNamespaces, log: SerdeLog) -> None:
        self._context = context
        self._chain = chain
        self._namespaces = namespaces
        self._log = log
        self._completions: Completions[CodedFrames] | None = None
        self._native: _native.SerdeQueue | None = None
        self._refreshing: asyncio.Future[None] | None = None
        self._refresh_from = 0.0

    def open(self) -> None:
        """On the loop that uses it."""
        self._native = _native.SerdeQueue(self._chain.native, self._context.config.serde_threads or default_threads())
        self._completions = Completions(self._native, CodedFrames)

    async def close(self) -> None:
        """Waits for everything that is being encoded or decoded. Idempotent, also before `open`."""
        if self._completions is not None:
            await self._completions.close()

    async def run(
        self,
        encodes: bool,
        keys: Sequence[ObjectKey],
        sources: Sequence[memoryview],
        destinations: Sequence[memoryview],
        users: Sequence[Operation],
    ) -> CodedFrames | None:
        """`keys` are those of stored objects. None when the deadline came first: it goes on, and what was lent to
        `users` stays lent until it ends."""
        assert self._native is not None and self._completions is not None, "not open"
        self._refresh()
        namespaces = list(dict.fromkeys(key.namespace for key in keys))
        positions = {namespace: index for index, namespace in enumerate(namespaces)}
        number = self._native.submit(
            encodes,
            list(sources),
            list(destinations),
            b"".join(key.chunk_hash for key in keys),
            b"".join(self._namespaces.templates(namespace) for namespace in namespaces),
            array("I", [positions[key.namespace] for key in keys]),
        )
        coding = self._completions.wait(number, (sources, destinations))
        for user in users:
            user.lent.add_user()
            coding.add_done_callback(lambda _, lent=user.lent: lent.done())  # type: ignore[misc]
        deadline = users[0].deadline
        done, _ = await asyncio.wait({coding}, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
        if not done:
            self._context.metrics.timeouts.inc()
            self._log.warn("%d objects were not %s within the deadline", len(keys), "encoded" if encodes else "decoded")
        return coding.result() if done else None

    def _refresh(self) -> None:
        """Has a thread look for changed settings. This batch does not wait for it."""
        loop = asyncio.get_running_loop()
        is_busy = self._refreshing is not None and not self._refreshing.done()
        if self._chain.may_change and not is_busy and loop.time() >= self._refresh_from:
            self._refresh_from = loop.time() + REFRESH_SECONDS
            self._refreshing = loop.run_in_executor(None, self._chain.refresh)
