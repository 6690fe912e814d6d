"""What a router adds to the requests that it sends to engines."""

from __future__ import annotations

# To an engine that computes a prompt for another one, as vLLM's own routers do.
FOR_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
