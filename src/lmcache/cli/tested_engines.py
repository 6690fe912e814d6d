"""The versions of vLLM that were tested with this package, as `make matrix` found them (`tested_engines.json`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
PASSED = "passed"
MAX_HIT_RATIO = 1.1  # that a version's hit may take, to one of the version that the package is developed with
TIMED_TOKENS = 16 * 256 + 1  # whole chunks, and what a hit leaves to compute: its time is not that of vLLM's kernels
_ON_CPU, _ITS_PARTS = "engine on CPU", "its scheduler, without a device"


@dataclass(frozen=True)
class EngineResult:
    """`scenarios`: what each came to, "passed" or else. `runs`: it ran as a whole; otherwise its own scheduler and
    connector interface ran against both sides of the connector, with blocks that no model filled. `tokens` and `kv`:
    digests of what it answered and kept in its KV cache, equal where two versions compute the same. `hit_ms` and
    `computed_ms`: time to first token of one prompt, from L1 and without, in the minutes of that run; 0: unmeasured.
    `hit_ratio`: such a hit's time to that of the version that the package is developed with, both measured in turns; 0:
    unmeasured. `explained`: why it is beyond `MAX_HIT_RATIO`, as somebody found out."""

    version: str
    runs: bool
    scenarios: Mapping[str, str] = field(default_factory=dict)
    tokens: str = ""
    kv: str = ""
    hit_ms: float = 0.0
    computed_ms: float = 0.0
    hit_ratio: float = 0.0
    explained: str = ""

    @property
    def is_slow(self) -> bool:
        """For no reason that is known."""
        return self.hit_ratio > MAX_HIT_RATIO and not self.explained

    @property
    def passed(self) -> bool:
        return bool(self.scenarios) and set(self.scenarios.values()) == {PASSED}


def known_engines(file: Path = FILE) -> tuple[EngineResult, ...]:
    """In the order of their versions."""
    return tuple(EngineResult(**entry) for entry in json.loads(file.read_text()))


def markdown_table(engines: Sequence[EngineResult]) -> str:
    """The README's table: a line a version, with its times where any was measured."""
    lines = ["| vLLM | ran as | passed |", "|---|---|---|"]
    for engine in engines:
        how = _ON_CPU if engine.runs else _ITS_PARTS
        results = [
            name if outcome == PASSED else f"{name}: **{outcome}**" for name, outcome in engine.scenarios.items()
        ]
        lines.append(f"| {engine.version} | {how} | {', '.join(results)} |")
    if any(engine.hit_ms for engine in engines):
        times = [_times(engine) if engine.hit_ms else "" for engine in engines]
        column = [f"first token of {TIMED_TOKENS:,} tokens: from L1 / computed", "---", *times]
        lines = [f"{line} {cell} |" for line, cell in zip(lines, column, strict=True)]
    return "\n".join(lines)


def _times(engine: EngineResult) -> str:
    said = f"{engine.hit_ms:.0f} / {engine.computed_ms:.0f} ms"
    if engine.hit_ratio:
        said += f"; in turns {engine.hit_ratio:.2f} times the reference's"
    return f"{said} ({engine.explained})" if engine.explained else said


def judge(version: str, engines: Sequence[EngineResult]) -> tuple[bool, str]:
    """(whether nothing needs to be said, what is known of this version of vLLM). The part behind a + is the build's."""
    release = version.partition("+")[0]
    whole = [engine.version for engine in engines if engine.runs and engine.passed]
    found = next((engine for engine in engines if engine.version == release), None)
    if found is None:
        return False, f"not tested; {', '.join(whole)} are"
    if not found.passed:
        failed = [name for name, outcome in found.scenarios.items() if outcome != PASSED]
        return False, f"tested, and {', '.join(failed)} failed; {', '.join(whole)} passed everything"
    if not found.runs:
        return True, "tested by its own scheduler and connector interface, not as a whole engine"
    return True, "tested as a whole engine on CPU"
