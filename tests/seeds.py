"""The seed of every random test: the same in each `make test`, a new one in `make nightly`, which prints it.

TEST_SEED repeats a run.
"""

from __future__ import annotations

import os

FIXED_SEED = 1
SEED = int(os.environ.get("TEST_SEED", str(FIXED_SEED)))
