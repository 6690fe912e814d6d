"""Runs inside vLLM's workers (`--worker-extension-cls`): digests of KV blocks as they are stored and after a load.

The digests are taken from the engine's own tensors, so they check the copier and everything behind it.
"""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections.abc import Callable
from typing import Any


class _WatchedLoad:
    """A job of a load; `copied` is called when it has ended and every chunk was copied, before that is reported."""

    def __init__(self, job: Any, copied: Callable[[], None]) -> None:
        self._job = job
        self._copied = copied
        self._has_ended = False

    def wait(self, seconds: float) -> Any:
        from lmcache.integration.engine.transfer_backend import COPIED

        flags = self._job.wait(seconds)
        if flags is not None and not self._has_ended:
            self._has_ended = True
            if all(flag == COPIED for flag in flags):
                self._copied()
        return flags


class KVProbe:
    """Mixed into the worker class; its methods are called with collective_rpc."""

    _stored: dict[str, str]
    _loaded: dict[str, str]

    def kv_watch(self) -> int:
        """Begins to take digests; the number of KV cache groups."""
        from lmcache.integration.engine.shm_transfer import ShmTransfer
        from lmcache.integration.engine.socket_transfer import SocketTransfer

        self._stored, self._loaded = {}, {}
        kinds: list[Any] = [ShmTransfer, SocketTransfer]
        submit_stores = {kind: kind.submit_store for kind in kinds}
        submit_loads = {kind: kind.submit_load for kind in kinds}

        def watched_store(attachment: Any, order: Any, reply: Any) -> Any:
            chunks = len(order.hashes) // 32
            wanted = order.wanted or bytes([1]) * len(order.blocks) * chunks
            for group, blocks in enumerate(order.blocks):
                of_group = wanted[group * chunks : (group + 1) * chunks]
                self._digest_chunks(self._stored, group, array("q", blocks), order.hashes, of_group)
            return submit_stores[type(attachment)](attachment, order, reply)

        def watched_load(attachment: Any, order: Any, fence: Any) -> list[_WatchedLoad]:
            def digest(group: int) -> None:
                load = order.groups[group]
                hashes = order.hashes[32 * load.first_chunk : 32 * order.hit_chunks]
                self._digest_chunks(self._loaded, group, array("q", load.blocks), hashes)

            jobs = submit_loads[type(attachment)](attachment, order, fence)
            return [_WatchedLoad(job, functools.partial(digest, group)) for group, job in enumerate(jobs)]

        for kind in kinds:
            kind.submit_store, kind.submit_load = watched_store, watched_load
        return len(self.model_runner.kv_cache_config.kv_cache_groups)  # type: ignore[attr-defined]

    def kv_seen(self) -> dict[str, Any]:
        """Digest by "group chunk-hash" of what was stored and loaded since `kv_watch`, and whose KV it is."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group().worker_side
        rank = worker.identity.kv_rank if worker is not None else 0
        return {"stored": self._stored, "loaded": self._loaded, "kv_rank": rank}

    def kv_held(self) -> list[str]:
        """Sentences: what the connector holds in this process, and calls without an answer."""
        import gc

        from lmcache.integration.engine.worker_side import WorkerSide
        from lmcache.integration.vllm.scheduler_side import SchedulerSide
        from open_calls import calls_in_flight

        held = [f"{calls} calls wait for an answer"] if (calls := calls_in_flight()) else []
        for side in [found for found in gc.get_objects() if isinstance(found, SchedulerSide | WorkerSide)]:
            try:
                side.check_idle()
            except AssertionError as fault:
                held.append(str(fault))
        return held

    def kv_stall(self) -> None:
        """From now on every store stops between its reservation and its copy, and every load never ends."""
        import time

        from lmcache.integration.engine.shm_transfer import CopyJob, ShmTransfer

        def stop(*_: Any) -> Any:
            while True:
                time.sleep(60)

        ShmTransfer.submit_store = stop
        CopyJob.wait = lambda job, seconds: None

    def _digest_chunks(
        self, digests: dict[str, str], group: int, blocks: array[int], hashes: bytes, wanted: bytes = b""
    ) -> None:
        """Of the chunks that are wanted, or have blocks."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        spec = runner.kv_cache_config.kv_cache_groups[group]
        caches = [runner.compilation_config.static_forward_context[name].kv_cache for name in spec.layer_names]
        tensors = [tensor for cache in caches for tensor in (cache if isinstance(cache, tuple) else (cache,))]
        chunks = len(hashes) // 32
        if not chunks:
            return
        per_chunk = len(blocks) // chunks
        for chunk in range(chunks):
            ids = list(blocks[chunk * per_chunk : (chunk + 1) * per_chunk])
            if min(ids) < 0 or not (wanted or bytes([1]) * chunks)[chunk]:
                continue
            digest = hashlib.sha256()
            for tensor in tensors:
                digest.update(tensor[ids].contiguous().view(dtype=_bytes_dtype()).numpy().tobytes())
            digests[f"{group} {hashes[32 * chunk : 32 * chunk + 32].hex()}"] = digest.hexdigest()


def _bytes_dtype() -> Any:
    import torch

    return torch.uint8
