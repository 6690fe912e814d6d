"""Jobs that have ended once every worker has reported it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class CompletionBarrier(Generic[T]):
    """Keeps a value for each job until as many workers as there are have reported its end."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._values: dict[int, T] = {}
        self._reports_missing: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, job: int) -> T:
        return self._values[job]

    def add(self, job: int, value: T) -> None:
        self._values[job] = value
        self._reports_missing[job] = self._workers

    def ended(self, reports: Mapping[int, int]) -> Iterator[tuple[int, T]]:
        """`reports`: how many more workers have reported, by job. Unknown jobs are passed over."""
        for job, count in reports.items():
            if job not in self._values:
                continue
            self._reports_missing[job] -= count
            if self._reports_missing[job] <= 0:
                del self._reports_missing[job]
                yield job, self._values.pop(job)
