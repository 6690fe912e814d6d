"""Time to first token from remote tiers with real vLLM on CPU, beside computing the prompt and beside an L1 hit.

    python benchmarks/end_to_end_remote.py [--tokens N] [--runs N] [--peer ENVIRONMENT] [TIER ...]

A server and an engine for each tier; in each run a new prompt is computed, and one that L1 has, or after L1 was cleared
the tier alone, is asked again. Every hit must be whole and is loaded, also where computing would be faster
(`lmcache.mp.load_or_recompute` is false). --peer: the virtual environment of LMCache 0.5.6 on the same vLLM. For fs,
resp, s3 and nixl it then has a server, an engine and a service of its own with the same settings, in turns with ours.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engines import first_token_seconds, prompt_of
from lmcache.testing.demo import wait_until_stored
from lmcache.testing.processes import CacheServer, VllmEngine
from lmcache.testing.tiny_models import make_llama
from measure import Result, at_most, command_line, report, spread
from remote_tiers import TIERS

CHUNK_TOKENS = 256
COMPUTED, FROM_L1, FROM_TIER = "computed", "L1 hit", "hit"
TRIALS = 10  # until a peer's tier has everything: each waits three seconds
SERVER = ("--l2-prefetch-policy", "retain")  # so that what came from the tier is in L1 for the next hit
PEER_SERVER = (*SERVER, "--supported-transfer-mode", "auto")
PEER_ENVIRONMENT = {"LMCACHE_TRACK_USAGE": "false", "PYTHONPATH": ""}
L1_SIZE_GB = 2


class Side:
    """A server with the tier and an engine: ours, or those of another environment."""

    def __init__(self, stack: ExitStack, tier: str, model: Path, folder: Path, objects: int, peer: Path | None) -> None:
        folder.mkdir()
        self.name = f"LMCache 0.5.6, {tier}" if peer else tier
        self.is_ours = peer is None
        adapter = ["--l2-adapter", json.dumps(stack.enter_context(TIERS[tier].serve(folder, objects)))]
        options: dict[str, Any] = {}
        config = {"lmcache.mp.load_or_recompute": False}
        if peer is not None:
            options = {"interpreter": str(peer / "bin" / "python"), "environment": PEER_ENVIRONMENT}
            config = {}
        flags = [*(SERVER if self.is_ours else (*PEER_SERVER, *TIERS[tier].peer_flags)), *adapter]
        self._server = stack.enter_context(CacheServer(folder, l1_size_gb=L1_SIZE_GB, extra=flags, **options))
        self._server.wait_ready(120.0)
        engine = VllmEngine(model, folder, cache_port=self._server.port, extra_config=config, **options)
        self.engine = stack.enter_context(engine)
        self.engine.wait_ready()
        self.engine.complete(prompt_of(0, 600), max_tokens=4)
        self.seconds: dict[str, list[float]] = {COMPUTED: [], FROM_L1: [], FROM_TIER: []}

    def fill(self, prompt: list[int]) -> None:
        """Until a hit of the prompt comes from the tier whole. RuntimeError when that does not happen."""
        self.engine.complete(prompt, max_tokens=1)
        if self.is_ours:
            wait_until_stored(self._server, len(prompt) // CHUNK_TOKENS)
        for _ in range(TRIALS):
            if self._ask(FROM_TIER, prompt)[1] >= whole_hit(prompt):
                return
        raise RuntimeError(f"{self.name}: after {TRIALS} trials the tier does not have all of the prompt.")

    def run(self, source: str, prompt: list[int]) -> None:
        """AssertionError where the KV did not come from there."""
        before = self._tokens_from_tier()
        seconds, cached = self._ask(source, prompt)
        assert cached >= whole_hit(prompt) if source != COMPUTED else cached == 0, (self.name, source, cached)
        if self.is_ours:
            from_tier = self._tokens_from_tier() - before
            assert from_tier == (len(prompt) if source == FROM_TIER else 0), (self.name, source, from_tier)
        self.seconds[source].append(seconds)

    def _ask(self, source: str, prompt: list[int]) -> tuple[float, int]:
        if source == FROM_TIER:
            self._server.clear("l1")
        return first_token_seconds(self.engine, prompt)

    def _tokens_from_tier(self) -> float:
        return self._server.metric("lmcache_mp_lookup_hit_l2_tokens_total") if self.is_ours else 0.0

    def results(self, tokens: int) -> list[Result]:
        medians = {source: statistics.median(seconds) for source, seconds in self.seconds.items()}
        name = f"{self.name}, {tokens} tokens"
        lines = [
            Result(f"{name}: {source}", medians[source] * 1000, "ms", detail=spread(seconds, 1000))
            for source, seconds in self.seconds.items()
        ]
        return [*lines, Result(f"{name}: hit / computed", medians[FROM_TIER] / medians[COMPUTED], "ratio")]


def whole_hit(prompt: Sequence[int]) -> int:
    """Tokens: the last one is always computed, and some computes its chunk."""
    return (len(prompt) - 1) // CHUNK_TOKENS * CHUNK_TOKENS


def measure(tier: str, model: Path, folder: Path, tokens: int, runs: int, peer: Path | None) -> list[Result]:
    objects = (runs + 2) * (tokens // CHUNK_TOKENS + 1)
    with ExitStack() as stack:
        sides = [Side(stack, tier, model, folder / "ours", objects, None)]
        if peer is not None and TIERS[tier].in_peer:
            sides.append(Side(stack, tier, model, folder / "peer", objects, peer))
        prompt = prompt_of(1, tokens)
        for side in sides:
            side.fill(prompt)
        for run in range(runs):
            for source in (FROM_L1, COMPUTED, FROM_TIER):
                for side in sides if run % 2 else reversed(sides):
                    side.run(source, prompt if source != COMPUTED else prompt_of(1000 + run, tokens))
        results = [result for side in sides for result in side.results(tokens)]
        if len(sides) == 2:
            results += [_beside_peer(tier, source, *sides) for source in (FROM_L1, FROM_TIER)]
        return results


def _beside_peer(tier: str, source: str, ours: Side, peer: Side) -> Result:
    ratios = [own / theirs for own, theirs in zip(ours.seconds[source], peer.seconds[source], strict=True)]
    return at_most(f"{tier}: {source} / that of LMCache 0.5.6", statistics.median(ratios), "ratio", 1.0, spread(ratios))


def main() -> int:
    parser = command_line(__doc__, runs=7)
    parser.add_argument("tiers", nargs="*", choices=[[], *TIERS], metavar="TIER", help=", ".join(TIERS))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--peer", type=Path, help="virtual environment of LMCache 0.5.6")
    options = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-") as place:
        model = make_llama(Path(place) / "model")
        for tier in options.tiers or TIERS:
            folder = Path(place) / tier
            folder.mkdir()
            results += measure(tier, model, folder, options.tokens, options.runs, options.peer)
    return report(results, options.json)


if __name__ == "__main__":
    sys.exit(main())
