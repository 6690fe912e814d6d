"""The connector with a stopwatch at every call that vLLM makes to it. Loaded by the engine of `overhead.py`."""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from lmcache.integration.vllm.connector import LMCacheMPConnector

seconds: defaultdict[str, float] = defaultdict(float)  # of this process, which runs the scheduler and the worker
HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_block_frees",
    "has_pending_push_work",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
)


def _timed(name: str) -> Any:
    call = getattr(LMCacheMPConnector, name)

    @functools.wraps(call)
    def timed(self: Any, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(self, *arguments, **named)
        finally:
            seconds[name] += time.perf_counter() - began

    return timed


class TimedConnector(LMCacheMPConnector):
    pass


for _name in HOOKS:
    setattr(TimedConnector, _name, _timed(_name))


class Times:
    """Mixed into vLLM's worker; called by collective_rpc."""

    def connector_seconds(self) -> dict[str, float]:
        """Seconds inside each call since the start, and of CPU of the connector's own threads."""
        ticks = 0
        for thread in threading.enumerate():
            if thread.name.startswith("lmcache"):
                fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(") ")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return {**seconds, "threads": ticks / 100}
