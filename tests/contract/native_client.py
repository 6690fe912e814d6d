"""What an author of a native_plugin may have written, in Python: threads, an eventfd, strings for keys."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from typing import Any

SPACES: dict[str, dict[str, bytes]] = {}  # objects outlive a client, as in a server somewhere


class Client:
    """`says_each`: reports one bool a key, else only whether the batch went well. `resets`: its drain resets the
    eventfd. `fails`: batches of these acts go wrong. `submitted` and `reported` count batches."""

    def __init__(self, space: str, says_each: bool = True, resets: bool = True, fails: Sequence[str] = ()) -> None:
        self.objects = SPACES.setdefault(space, {})
        self.fails = set(fails)
        self._says_each = says_each
        self._resets = resets
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.submitted = self.reported = 0
        self._batches: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._done: list[Any] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def event_fd(self) -> int:
        return self._fd

    def submit_batch_set(self, keys: list[str], buffers: list[memoryview]) -> int:
        return self._submit("set", keys, buffers)

    def submit_batch_get(self, keys: list[str], buffers: list[memoryview]) -> int:
        return self._submit("get", keys, buffers)

    def submit_batch_exists(self, keys: list[str]) -> int:
        return self._submit("exists", keys, keys)

    def drain_completions(self) -> list[tuple[int, bool, str, list[bool] | None]]:
        if self._resets:
            try:
                os.eventfd_read(self._fd)
            except BlockingIOError:
                pass
        with self._lock:
            done, self._done = self._done, []
        self.reported += len(done)
        return done

    def close(self) -> None:
        self._batches.put(None)
        self._thread.join()
        os.close(self._fd)

    def _submit(self, act: str, keys: list[str], others: Sequence[Any]) -> int:
        assert all(len(key) == 129 and key.replace("_", "").isalnum() for key in keys)
        self.submitted += 1
        self._batches.put((self.submitted, act, keys, others))
        return self.submitted

    def _work(self) -> None:
        while (batch := self._batches.get()) is not None:
            number, act, keys, others = batch
            broken = act in self.fails
            each = [not broken and self._one(act, key, other) for key, other in zip(keys, others, strict=True)]
            says_each = self._says_each or act in ("exists", "delete")
            with self._lock:
                self._done.append((number, not broken and (act == "exists" or all(each)), "broken" if broken else "",
                                   each if says_each and not broken else None))  # fmt: skip
            os.eventfd_write(self._fd, 1)

    def _one(self, act: str, key: str, other: Any) -> bool:
        if act == "set":
            self.objects[key] = bytes(other)
        elif act == "get":
            frame = self.objects.get(key)
            if frame is None:
                return False
            other[: len(frame)] = frame[: len(other)]
        elif act == "delete":
            self.objects.pop(key, None)
        return act != "exists" or key in self.objects


class DeletingClient(Client):
    def submit_batch_delete(self, keys: list[str]) -> int:
        return self._submit("delete", keys, keys)


class LateClient(DeletingClient):
    """`gate`: what a load writes waits for it. `breaks`: so many drains raise, before anything is taken. `mangle`: what
    becomes of a report."""

    def __init__(self, space: str) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.breaks = self.drains = 0
        self.closing = self.at_the_gate = False
        self.mangle: Any = None
        super().__init__(space)

    def drain_completions(self) -> Any:
        self.drains += 1
        if self.breaks:
            self.breaks -= 1
            raise RuntimeError("drain broke")
        done = super().drain_completions()
        return [part for report in done for part in self.mangle(report)] if self.mangle else done

    def close(self) -> None:
        self.closing = True
        super().close()

    def _one(self, act: str, key: str, other: Any) -> bool:
        if act == "get":
            self.at_the_gate = True
            self.gate.wait()
        return super()._one(act, key, other)


class EvictingClient(DeletingClient):
    """Of a backend that keeps nothing. `largest_batch`: keys of the largest one yet, by act."""

    def __init__(self, space: str) -> None:
        self.largest_batch: dict[str, int] = {}
        super().__init__(space)

    def _submit(self, act: str, keys: list[str], others: Sequence[Any]) -> int:
        self.largest_batch[act] = max(self.largest_batch.get(act, 0), len(keys))
        return super()._submit(act, keys, others)

    def _one(self, act: str, key: str, other: Any) -> bool:
        return act in ("set", "delete")
