"""What a run of several suites came to, as the table at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Outcome:
    suite: str
    result: str = "not run"
    seconds: float = 0.0


def table(outcomes: Sequence[Outcome]) -> str:
    lines = [f"{outcome.suite:<12} | {outcome.seconds:>7.0f} | {outcome.result}" for outcome in outcomes]
    return "\n".join([f"{'suite':<12} | seconds | result", *lines])


def exit_code(outcomes: Sequence[Outcome]) -> int:
    return 0 if all(outcome.result == "passed" for outcome in outcomes) else 1
