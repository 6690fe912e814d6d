"""The connector as vLLM's scheduler makes it, alone or in a MultiConnector, in the environment that the configuration
carries."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from lmcache.integration.vllm.connector import LMCacheMPConnector
from simulation.loading_connector import ENGINE, LoadingConnector

ENVIRONMENT = "environment"  # key of `kv_connector_extra_config`


class SimulatedConnector(LMCacheMPConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        environment = vllm_config.kv_transfer_config.kv_connector_extra_config[ENVIRONMENT]
        super().__init__(vllm_config, role, kv_cache_config, environment)


class SimulatedMultiConnector(MultiConnector):
    """With ours, and perhaps others."""

    scheduler_side = property(lambda self: _ours(self).scheduler_side)
    worker_side = property(lambda self: _ours(self).worker_side)


def _ours(multi: MultiConnector) -> SimulatedConnector:
    return next(each for each in multi.sub_connectors if isinstance(each, SimulatedConnector))


def transfer_settings(
    role: str, extra: dict[str, Any], multi: dict[str, Any] | None, beside: str, engine: Any
) -> dict[str, Any]:
    """Of `KVTransferConfig`; the rest as in `Shape`."""
    connectors = [_of_class(SimulatedConnector, role, extra)]
    if multi is None:
        return connectors[0]
    if beside:
        connectors.insert(0 if beside == "before" else 1, _of_class(LoadingConnector, role, {ENGINE: engine}))
    return {**_of_class(SimulatedMultiConnector, role, {"connectors": connectors}), **multi}


def _of_class(connector: type, role: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": connector.__name__,
        "kv_connector_module_path": connector.__module__,
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }
