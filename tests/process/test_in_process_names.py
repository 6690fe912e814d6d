"""Keys of LMCache inside an engine, from its environment to a real server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from lmcache.integration.engine.owned_server import OwnedServer
from lmcache.integration.engine.run_folder import run_folder_path
from lmcache.integration.vllm.lmcache_connector_v1 import in_process_settings
from lmcache.testing.processes import free_port, http_json
from polling import until

START_SECONDS = 60.0


def test_variables_of_an_engine_reach_the_server_that_it_starts(tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 64\ncache_policy: S3FIFO\n")
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")},
        "LMCACHE_CONFIG_FILE": str(file),
        "LMCACHE_CHUNK_SIZE": "128",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.0625",
        "LMCACHE_LOCAL_DISK": f"file://{tmp_path}/kv",
        "LMCACHE_INTERNAL_API_SERVER_ENABLED": "True",
        "LMCACHE_INTERNAL_API_SERVER_PORT_START": str(port),
        "LMCACHE_LMCACHE_INSTANCE_ID": "seven",
        "LMCACHE_L1_WRITE_TTL_SECONDS": "77",  # of a server, and no key of LMCache inside an engine
    }
    order = in_process_settings({}, environ, f"engine-{port}").autostart
    assert order is not None
    server = OwnedServer.enter(order)
    try:
        server.wait(START_SECONDS)
        _, config = http_json(port, "GET", "/config")
    finally:
        server.leave()
    wanted = {
        "chunk_size": 128,
        "eviction_policy": "S3FIFO",
        "l1_size_gb": 0.0625,
        "l2_adapter": [{"type": "fs_native", "base_path": f"{tmp_path}/kv"}],
        "service_instance_id": "seven",
        "http_host": "127.0.0.1",
        "l1_write_ttl_seconds": 77.0,
    }
    assert {name: config[name] for name in wanted} == wanted
    until(lambda: not list(run_folder_path().glob(f"{order.name}*")))
