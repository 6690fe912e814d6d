"""The trace that a request belongs to, as vLLM keeps it: the headers of the HTTP request, where vLLM itself traces."""

from __future__ import annotations

import re
from typing import Any

# W3C Trace Context, version 00: trace id, id of the span that called, flags.
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def trace_parent(request: Any) -> str:
    """The `traceparent` that the engine's request came with; "" for none, or one that breaks the format."""
    headers = getattr(request, "trace_headers", None) or {}
    text = headers.get("traceparent", "")
    return text if isinstance(text, str) and _TRACE_PARENT.fullmatch(text) else ""
