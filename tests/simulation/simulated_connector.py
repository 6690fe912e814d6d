"""The connector as vLLM's scheduler makes it, alone or in a MultiConnector, in the environment that the configuration
carries."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from lmcache.integration.vllm.connector import LMCacheMPConnector

ENVIRONMENT = "environment"  # key of `kv_connector_extra_config`


class SimulatedConnector(LMCacheMPConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        environment = vllm_config.kv_transfer_config.kv_connector_extra_config[ENVIRONMENT]
        super().__init__(vllm_config, role, kv_cache_config, environment)


class SimulatedMultiConnector(MultiConnector):
    """Its last connector is ours."""

    scheduler_side = property(lambda self: self.sub_connectors[-1].scheduler_side)
    worker_side = property(lambda self: self.sub_connectors[-1].worker_side)
