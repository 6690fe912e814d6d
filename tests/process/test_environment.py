"""A server takes randomness from what it is given."""

from __future__ import annotations

import random

from lmcache.environment import Environment
from process.support import server_within


def test_what_spreads_retries_begins_with_the_bytes_that_the_server_is_given() -> None:
    adapter = {"type": "mock", "max_size_gb": 0.01, "mock_bandwidth_gb": 1}
    environment = Environment(random_bytes=lambda count: b"\x07" * count)
    with server_within(environment, l2_adapter=[adapter]) as server:
        (runner,) = server.storage.runners
        assert runner.context.rng.getstate() == random.Random(b"\x07" * 16).getstate()
