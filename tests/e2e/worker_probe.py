"""Runs inside vLLM's workers (`--worker-extension-cls`): digests of KV blocks as they are stored and after a load.

The digests are taken from the engine's own tensors, so they check the copier and everything behind it.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Any


class KVProbe:
    """Mixed into the worker class; its methods are called with collective_rpc."""

    _stored: dict[str, str]
    _loaded: dict[str, str]

    def kv_watch(self) -> int:
        """Begins to take digests; the number of KV cache groups."""
        from lmcache.integration.vllm.attachment import COPIED, Attachment
        from lmcache.integration.vllm.socket_attachment import SocketAttachment
        from lmcache.integration.vllm.worker_side import WorkerSide

        self._stored, self._loaded = {}, {}
        submit_stores = {kind: kind.submit_store for kind in (Attachment, SocketAttachment)}
        load_ended = WorkerSide._load_ended

        def watched_store(attachment: Any, order: Any, reply: Any) -> Any:
            chunks = len(order.hashes) // 32
            wanted = order.wanted or bytes([1]) * len(order.blocks) * chunks
            for group, blocks in enumerate(order.blocks):
                of_group = wanted[group * chunks : (group + 1) * chunks]
                self._digest_chunks(self._stored, group, array("q", blocks), order.hashes, of_group)
            return submit_stores[type(attachment)](attachment, order, reply)

        def watched_load(side: Any, order: Any, results: Any) -> None:
            for group, load in enumerate(order.groups):
                if results is not None and all(flag == COPIED for flag in results[group]):
                    hashes = order.hashes[32 * load.first_chunk : 32 * order.hit_chunks]
                    self._digest_chunks(self._loaded, group, array("q", load.blocks), hashes)
            load_ended(side, order, results)

        for kind in submit_stores:
            kind.submit_store = watched_store  # type: ignore[attr-defined]
        WorkerSide._load_ended = watched_load  # type: ignore[method-assign]
        return len(self.model_runner.kv_cache_config.kv_cache_groups)  # type: ignore[attr-defined]

    def kv_seen(self) -> dict[str, Any]:
        """Digest by "group chunk-hash" of what was stored and loaded since `kv_watch`, and whose KV it is."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group()._worker
        rank = worker._identity.kv_rank if worker is not None else 0
        return {"stored": self._stored, "loaded": self._loaded, "kv_rank": rank}

    def kv_held(self) -> dict[str, int]:
        """What the connector holds in this process, and calls without an answer."""
        import gc

        from lmcache.integration.vllm.scheduler_side import SchedulerSide
        from lmcache.integration.vllm.worker_side import WorkerSide
        from lmcache.transport.client import Connection

        held = {"requests": 0, "pins": 0, "loads": 0, "stores": 0, "calls": 0}
        for one in gc.get_objects():
            if isinstance(one, SchedulerSide):
                held["requests"] += len(one._requests) + len(one._storing)
                held["pins"] += len(one._pins._jobs)
            elif isinstance(one, WorkerSide):
                held["loads"] += len(one._loads)
                held["stores"] += one._storer._running + len(one._storer._unsettled)
            elif isinstance(one, Connection):
                held["calls"] += len(one._pendings)
        return held

    def kv_stall(self) -> None:
        """From now on every store stops between its reservation and its copy, and every load never ends."""
        import time

        from lmcache.integration.vllm.attachment import Attachment, CopyJob

        def stop(*_: Any) -> Any:
            while True:
                time.sleep(60)

        Attachment.submit_store = stop  # type: ignore[method-assign]
        CopyJob.wait = lambda job, seconds: None  # type: ignore[method-assign]

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
