"""Jobs that have ended once every worker has said so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class Awaited(Generic[T]):
    """What is kept for each job until then."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._kept: dict[int, T] = {}
        self._reports_missing: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, job: int) -> T:
        return self._kept[job]

    def add(self, job: int, kept: T) -> None:
        self._kept[job] = kept
        self._reports_missing[job] = self._workers

    def ended(self, reports: Mapping[int, int]) -> Iterator[tuple[int, T]]:
        """`reports`: how many more workers have said so, by job. Jobs that are not awaited are passed over."""
        for job, count in reports.items():
            if job not in self._kept:
                continue
            self._reports_missing[job] -= count
            if self._reports_missing[job] <= 0:
                del self._reports_missing[job]
                yield job, self._kept.pop(job)
