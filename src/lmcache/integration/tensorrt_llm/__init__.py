"""The connector of TensorRT-LLM: its `kv_connector_config` names `tensorrt_mp_adapter`."""
