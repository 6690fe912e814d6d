"""What the connector makes of the engine's calls, where its two runners differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from lmcache.integration.engine.connector_metadata import ConnectorMetadata
from lmcache.integration.vllm.connector import LMCacheMPConnector

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("metadata", "arguments", "idle"),
    [
        ({"layer": 1}, {}, False),  # within the context of a forward pass
        (None, {"request_ids": ["a"]}, False),  # after it, on GPUs: it may still run
        (None, {}, True),  # a step without one
    ],
)
def test_a_step_is_idle_only_without_a_forward_pass(metadata: Any, arguments: dict[str, Any], idle: bool) -> None:
    seen: list[bool] = []
    connector = LMCacheMPConnector.__new__(LMCacheMPConnector)
    connector.worker_side = SimpleNamespace(start_loads=lambda orders, *, idle_step: seen.append(idle_step))
    connector.bind_connector_metadata(ConnectorMetadata())
    connector.start_load_kv(SimpleNamespace(attn_metadata=metadata), **arguments)
    assert seen == [idle]
