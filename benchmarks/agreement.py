"""What a serde does to answers: greedy tokens of a real model after a hit, beside those after a hit of exact KV.

    python benchmarks/agreement.py [--prompts N] [--tokens N] [--answers FILE] [KIND ...]

Each prompt, a question about a passage of Python's manual (real_model.py), is computed and stored, L1 is cleared, and
the prompt is asked again: all its whole chunks come from fs_native with that serde. The others are compared with
`plain`, the adapter without a serde: a hit computes with other batches than a cold run, and vLLM then rounds otherwise.
How far that alone changes answers is in the lines of the prompts computed twice, of `plain` beside the first of them,
and of the lossless serdes beside `plain`. Sizes are those of the files. Errors of K and of V are the root of the mean
square of the error over that of the values, in the KV of all prompts.

--answers keeps what each kind answered, so that a run can be continued and further kinds be added.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import real_model
from lmcache import _native
from lmcache.testing.demo import wait_until_stored
from lmcache.testing.processes import CacheServer, VllmEngine
from measure import Result, command_line, report

PLAIN = "plain"
SHORTEST, STEP, DIFFERENT = 520, 41, 6  # tokens of prompts: two chunks and a rest that is computed


class Kind(NamedTuple):
    """A serde as the adapter's JSON has it, and what an engine must accept for it."""

    serde: dict[str, Any] | None
    lossy: str = ""


KINDS = {
    PLAIN: Kind(None),
    "exponent": Kind({"type": "exponent"}),
    "zstd": Kind({"type": "zstd"}),
    "fp8": Kind({"type": "fp8"}, "fp8"),
    "fp8-e5m2": Kind({"type": "fp8", "fp8_dtype": "float8_e5m2"}, "fp8-e5m2"),
    "cachegen": Kind({"type": "cachegen"}, "cachegen"),
    "cachegen-16": Kind({"type": "cachegen", "bins": 16}, "cachegen-16"),
}
STAGES: dict[str, Callable[[], _native.SerdeStage]] = {
    "fp8": lambda: _native.fp8_stage("e4m3"),
    "fp8-e5m2": lambda: _native.fp8_stage("e5m2"),
    "cachegen": lambda: _native.cachegen_stage(32),
    "cachegen-16": lambda: _native.cachegen_stage(16),
}


class Errors:
    """Sums of squares over objects: of K and V, and of what a stage makes of them."""

    def __init__(self) -> None:
        self._values = [0.0, 0.0]
        self._lost = {name: [0.0, 0.0] for name in STAGES}
        self._stages = {name: make() for name, make in STAGES.items()}

    def add(self, payload: bytes) -> None:
        exact = _keys_and_values(payload)
        for part in (0, 1):
            self._values[part] += float(exact[:, part].square().sum())
        for name, stage in self._stages.items():
            encoded, decoded = bytearray(stage.max_encoded_bytes(len(payload))), bytearray(len(payload))
            written = stage.encode(payload, encoded)
            assert written is not None
            assert stage.decode(memoryview(encoded)[: written[0]], decoded, written[1]) == ""
            lost = _keys_and_values(decoded) - exact
            for part in (0, 1):
                self._lost[name][part] += float(lost[:, part].square().sum())

    def relative(self) -> dict[str, list[float]]:
        """Returns the relative error of K and of V, for each stage."""
        return {
            name: [math.sqrt(part / whole) for part, whole in zip(lost, self._values, strict=True)]
            for name, lost in self._lost.items()
        }


def _keys_and_values(payload: bytes | bytearray) -> Any:
    """[run, K or V, element] in float64: vLLM on CPU has the K of a block's head, then its V, each packed in itself."""
    import torch

    run = real_model.BLOCK_TOKENS * real_model.HEAD_ELEMENTS
    return torch.frombuffer(bytearray(payload), dtype=torch.bfloat16).reshape(-1, 2, run).double()


def ask(engine: VllmEngine, prompts: Sequence[list[int]], tokens: int, *, hits: bool) -> list[list[int]]:
    """Greedy answers, one after the other. AssertionError where a prompt did not come from where it should."""
    answers = []
    for prompt in prompts:
        answer = engine.complete(prompt, max_tokens=tokens)
        expected = (len(prompt) - 1) // real_model.CHUNK_TOKENS * real_model.CHUNK_TOKENS if hits else 0
        assert answer.cached_tokens == expected, (answer.cached_tokens, expected)
        answers.append(list(answer.token_ids))
    return answers


def keep_until_stored(server: CacheServer, prompts: Sequence[list[int]]) -> None:
    """Until L2 has them; then they are nowhere else."""
    wait_until_stored(server, sum(len(prompt) // real_model.CHUNK_TOKENS for prompt in prompts))
    server.clear("l1")


def run_kind(name: str, model: Path, prompts: Sequence[list[int]], tokens: int) -> dict[str, Any]:
    """`answers` of each round, and `size_bytes` of all objects; of `plain` also the `errors` of all stages."""
    kind = KINDS[name]
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-agreement-") as place:
        l2 = Path(place) / "l2"
        adapter: dict[str, Any] = {"type": "fs_native", "base_path": str(l2)}
        if kind.serde is not None:
            adapter["serde"] = kind.serde
        accepts = {"lmcache.mp.lossy_serde": kind.lossy} if kind.lossy else {}
        with real_model.running(model, Path(place), adapter, l1_size_gb=2, **accepts) as (server, engine):
            answers = {}
            if name == PLAIN:
                answers["computed"] = ask(engine, prompts, tokens, hits=False)
                server.clear("all")
                answers["computed again"] = ask(engine, prompts, tokens, hits=False)
            else:
                ask(engine, prompts, 1, hits=False)
            keep_until_stored(server, prompts)
            answers[name] = ask(engine, prompts, tokens, hits=True)
        outcome = {"answers": answers, "size_bytes": sum(path.stat().st_size for path in l2.rglob("*.data"))}
        if name == PLAIN:
            errors = Errors()
            for payload in real_model.payloads(l2):
                errors.add(payload)
            outcome["errors"] = errors.relative()
    return outcome


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=True)))


def compare(
    name: str, answers: Sequence[Sequence[int]], reference: Sequence[Sequence[int]], beside: str
) -> list[Result]:
    lengths = [common_prefix(first, second) for first, second in zip(answers, reference, strict=True)]
    whole = len(reference[0])
    label, count = f"{name} beside {beside}", len(lengths)
    return [
        Result(f"{label}: all {whole} tokens equal", 100 * lengths.count(whole) / count, "%", detail=f"of {count}"),
        Result(f"{label}: equal tokens at the beginning", sum(lengths) / count, "tokens"),
        Result(f"{label}: first token equal", 100 * sum(length > 0 for length in lengths) / count, "%"),
    ]


def results_of(outcomes: dict[str, dict[str, Any]]) -> list[Result]:
    plain = outcomes[PLAIN]
    answers = plain["answers"]
    results = compare("computed again", answers["computed again"], answers["computed"], "computed")
    results += compare(PLAIN, answers[PLAIN], answers["computed"], "computed")
    for name, outcome in outcomes.items():
        if name == PLAIN:
            continue
        results += compare(name, outcome["answers"][name], answers[PLAIN], PLAIN)
        results.append(Result(f"{name}: size", 100 * outcome["size_bytes"] / plain["size_bytes"], "% of raw"))
        for part, error in zip("KV", plain["errors"].get(name, ()), strict=False):
            results.append(Result(f"{name}: error of {part}", error, "of the RMS"))
    return results


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS], metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer (default: %(default)s)")
    parser.add_argument("--models", type=Path, default=real_model.MODELS, help="folder of models")
    parser.add_argument("--answers", type=Path, help="JSON file of what was answered")
    options = parser.parse_args()
    model = real_model.fetch(options.models)
    lengths = [SHORTEST + STEP * (index % DIFFERENT) for index in range(options.prompts)]
    prompts = real_model.questions(real_model.load_tokenizer(model), lengths)
    outcomes: dict[str, dict[str, Any]] = {}
    if options.answers is not None and options.answers.exists():
        outcomes = json.loads(options.answers.read_text())
    for name in dict.fromkeys((PLAIN, *(options.kinds or KINDS))):
        if name not in outcomes:
            started = time.monotonic()
            outcomes[name] = run_kind(name, model, prompts, options.tokens)
            print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
            if options.answers is not None:
                options.answers.write_text(json.dumps(outcomes))
    return report(results_of(outcomes), options.json)


if __name__ == "__main__":
    sys.exit(main())
