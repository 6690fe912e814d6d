"""A lookup names the trace that its request came with, as vLLM keeps it."""

from __future__ import annotations

from typing import cast

import pytest

from lmcache.client.client import Client
from lmcache.integration.vllm.groups import CacheGroup
from lmcache.integration.vllm.scheduler_options import SchedulerOptions
from lmcache.integration.vllm.scheduler_side import SchedulerSide
from manual_clock import ManualClock
from unit.integration.vllm.fakes import FakeClient, request

TRACE_PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("headers", "sent"),
    [
        ({"traceparent": TRACE_PARENT, "tracestate": "vendor=1"}, TRACE_PARENT),
        ({"tracestate": "vendor=1"}, ""),
        ({"traceparent": TRACE_PARENT[:-1]}, ""),
        ({"traceparent": TRACE_PARENT.replace("-", "_")}, ""),
        ({"traceparent": "x" * 70_000}, ""),
        (None, ""),
    ],
    ids=["whole", "none", "cut", "other marks", "long", "no headers"],
)
def test_a_request_tells_the_server_its_trace(headers: dict[str, str] | None, sent: str) -> None:
    client = FakeClient(ManualClock())
    options = SchedulerOptions(groups=(CacheGroup(128, ("layer0",)),), ranks=1, workers=1)
    side = SchedulerSide(cast(Client, client), "i", options)
    side.on_new_request(request("a", 600, trace_headers=headers))
    (lookup,) = client.messages("lookup")
    assert lookup.trace_parent == sent
