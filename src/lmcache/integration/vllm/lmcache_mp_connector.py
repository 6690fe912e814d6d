"""Where vLLM looks for the connector."""

from lmcache.integration.vllm.connector import LMCacheMPConnector

__all__ = ["LMCacheMPConnector"]
