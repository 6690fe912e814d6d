"""What a run of several suites came to, as the table at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Outcome:
    suite: str
    result: str = "not run"
    seconds: float = 0.0
    repeated: int = 0  # tests that failed beside others and passed alone


def table(outcomes: Sequence[Outcome]) -> str:
    lines = []
    for outcome in outcomes:
        note = f", {outcome.repeated} of its tests only when run again alone" if outcome.repeated else ""
        lines.append(f"{outcome.suite:<12} | {outcome.seconds:>7.0f} | {outcome.result}{note}")
    return "\n".join([f"{'suite':<12} | seconds | result", *lines])


def exit_code(outcomes: Sequence[Outcome]) -> int:
    return 0 if all(outcome.result == "passed" for outcome in outcomes) else 1
