"""A server before object stores whose disk is full: stores fail and are left alone, loads are not, and with room again
it stores again. Their answers do not tell a full disk from another fault."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lmcache.testing.processes import CacheServer
from polling import until
from process.remote_services import Start, azure_behind_nixl, s3, s3_behind_nixl
from process.support import SmallEngine
from services.network import grow_small_disk, with_small_disk

DISK_BYTES, LARGER_DISK_BYTES = 48 << 20, 512 << 20
PAYLOAD_BYTES = 4 << 20


@pytest.mark.parametrize(
    ("start", "folder", "fault"),
    [
        pytest.param(s3, "seaweedfs", "InternalError (500)", id="s3"),
        pytest.param(s3_behind_nixl, "seaweedfs", "", id="OBJ", marks=pytest.mark.slow),
        pytest.param(azure_behind_nixl, "azurite", "", id="AZURE_BLOB", marks=pytest.mark.slow),
    ],
)
def test_it_is_left_alone_while_full_and_used_again(start: Start, folder: str, fault: str, tmp_path: Path) -> None:
    """`fault`: what the log says then."""
    disk = tmp_path / folder / "data"

    def test() -> None:
        with ExitStack() as running:
            adapter = start(tmp_path, running).adapter
            other = {"type": "fs", "base_path": str(tmp_path / "files")}
            extra = [word for each in (adapter, other) for word in ("--l2-adapter", json.dumps(each))]
            server = running.enter_context(CacheServer(tmp_path, l1_size_gb=0.125, extra=extra))
            server.wait_ready()
            engine = running.enter_context(SmallEngine(server.port, payload_bytes=PAYLOAD_BYTES))
            prompts: list[bytes] = []

            def adapters() -> list[dict[str, Any]]:
                return list(server.status()["l2"]["adapters"])

            def loaded_bytes() -> float:
                return server.metric("lmcache_mp_l2_loaded_bytes_total", f'"{adapters()[0]["name"]}"')

            def tell() -> Any:
                return adapters(), server.log()[-2000:]

            def settled() -> bool:
                return not any(each["stores_in_flight"] for each in adapters())

            def store_another() -> bytes:
                prompts.append(engine.tokens(10 + len(prompts)))
                assert engine.store(prompts[-1]) == 1
                until(settled, 60.0, tell=tell)
                return prompts[-1]

            first = engine.tokens(0, 1)
            assert engine.store(first) == 2
            until(lambda: settled() and adapters()[0]["objects"] == 2, 60.0, tell=tell)

            def fills() -> bool:
                store_another()
                return bool(adapters()[0]["stores_suspended"])

            until(fills, 180.0, tell=tell)
            assert fault in server.log()
            late = store_another()
            until(lambda: adapters()[1]["objects"] == 2 + len(prompts), tell=tell)  # the other tier has all
            server.clear("l1")
            loaded = loaded_bytes()
            for name, tokens, chunks in (("first", first, 2), ("late", late, 1)):
                found = engine.lookup(name, tokens)
                assert found.chunks == chunks and engine.read(found)
                engine.end(name)
            assert loaded_bytes() - loaded >= 2 * PAYLOAD_BYTES, "of the first prompt, not by the other tier"
            assert not adapters()[0]["loads_suspended"]
            grow_small_disk(disk, LARGER_DISK_BYTES)
            had = adapters()[0]["objects"]

            def stores_again() -> bool:
                store_another()
                return bool(adapters()[0]["objects"] > had)

            until(stores_again, 180.0, tell=tell)
            until(lambda: not server.status()["l1"]["leases"] and not adapters()[0]["abandoned"], tell=tell)

    with_small_disk(disk, DISK_BYTES, test)
