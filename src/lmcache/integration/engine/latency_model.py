"""How long a load and how long computing the same tokens takes on this engine, as measured; which of them is faster.

A cold hit of a short prefix on a slow disk can take longer than the prefill that it spares. A load is skipped only when
it is expected to take more than twice as long as computing and `MIN_GAIN_SECONDS` more. Every `PROBE_EVERY`th time it
is tried all the same, because a backend that is never asked again could never prove faster.
"""

from __future__ import annotations

import enum
from collections import deque

from lmcache.clock import Clock

MIN_SAMPLES = 6
STOP_RATIO = 2.0  # skip loads from here on
GO_RATIO = 1.5  # load again from here on
MIN_GAIN_SECONDS = 0.1  # less is not worth the work that computing takes from other requests
PROBE_EVERY = 8
MIN_PREFILL_TOKENS = 128  # a step with fewer tokens says little about the rate of a prefill
_MAX_STEPS_IN_FLIGHT = 4
_DECAY = 0.9  # weight of a sample against the next


class Tier(enum.Enum):
    L1 = "l1"
    L2 = "l2"


class StepTimer:
    """How long the engine's steps take. One may be scheduled before the last has ended; they end in order."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps: deque[tuple[int, float]] = deque(maxlen=_MAX_STEPS_IN_FLIGHT)
        self._last_end = 0.0

    def step_begins(self, tokens: int) -> None:
        self._steps.append((tokens, self._clock.monotonic()))

    def step_ends(self) -> tuple[int, float]:
        """(tokens, seconds) of the oldest step under way; nothing when it is not known."""
        end = self._clock.monotonic()
        tokens, began = self._steps.popleft() if self._steps else (0, end)
        seconds = end - max(began, self._last_end)
        self._last_end = end
        return tokens, seconds


class LatencyFit:
    """seconds = latency + tokens / rate, fitted to the latest samples; both parts at least 0."""

    def __init__(self) -> None:
        self.samples = 0
        self._weight = self._n = self._nn = self._t = self._nt = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        keep = _DECAY
        self.samples += 1
        self._weight = keep * self._weight + 1
        self._n = keep * self._n + tokens
        self._nn = keep * self._nn + tokens * tokens
        self._t = keep * self._t + seconds
        self._nt = keep * self._nt + tokens * seconds

    def seconds(self, tokens: int) -> float:
        """Expected for that many tokens; 0 without samples."""
        if not self.samples:
            return 0.0
        spread = self._weight * self._nn - self._n * self._n
        slope = (self._weight * self._nt - self._n * self._t) / spread if spread > 1e-9 * self._nn else 0.0
        mean_tokens, mean_seconds = self._n / self._weight, self._t / self._weight
        slope = min(max(slope, 0.0), mean_seconds / mean_tokens)
        return mean_seconds + slope * (tokens - mean_tokens)


class LatencyModel:
    """Belongs to the scheduler's thread."""

    def __init__(self) -> None:
        self._prefill_tokens = 0.0
        self._prefill_seconds = 0.0
        self._prefills = 0
        self._loads = {tier: LatencyFit() for tier in Tier}
        self._skipping = dict.fromkeys(Tier, False)
        self._skipped = dict.fromkeys(Tier, 0)

    def computed(self, tokens: int, seconds: float) -> None:
        """A step computed that many tokens."""
        if tokens >= MIN_PREFILL_TOKENS and seconds > 0:
            self._prefills += 1
            self._prefill_tokens = _DECAY * self._prefill_tokens + tokens
            self._prefill_seconds = _DECAY * self._prefill_seconds + seconds

    def loaded(self, tier: Tier, tokens: int, seconds: float) -> None:
        """L1: from the order to its end. L2: from the lookup to its answer."""
        self._loads[tier].add(tokens, seconds)

    def compute_seconds(self, tokens: int) -> float:
        return tokens * self._prefill_seconds / self._prefill_tokens if self._prefills else 0.0

    def load_seconds(self, tier: Tier, tokens: int) -> float:
        return self._loads[tier].seconds(tokens)

    def worth_loading(self, tier: Tier, tokens: int) -> bool:
        """To be asked once for each load: counts those that are skipped."""
        if self._prefills < MIN_SAMPLES or self._loads[tier].samples < MIN_SAMPLES:
            return True
        load, compute = self.load_seconds(tier, tokens), self.compute_seconds(tokens)
        ratio = GO_RATIO if self._skipping[tier] else STOP_RATIO
        slower = load > ratio * compute and load - compute > MIN_GAIN_SECONDS
        self._skipping[tier] = slower
        if not slower:
            return True
        self._skipped[tier] += 1
        return self._skipped[tier] % PROBE_EVERY == 0
