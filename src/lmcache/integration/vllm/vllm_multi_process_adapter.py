"""Where vLLM's own connector class (LMCACHE_USE_UPSTREAM_MP=1) looks for what it is built on."""

from lmcache.integration.vllm.upstream_scheduler import LMCacheMPSchedulerAdapter
from lmcache.integration.vllm.upstream_types import LoadStoreOp, ParallelStrategy
from lmcache.integration.vllm.upstream_worker import LMCacheMPWorkerAdapter

__all__ = ["LMCacheMPSchedulerAdapter", "LMCacheMPWorkerAdapter", "LoadStoreOp", "ParallelStrategy"]
