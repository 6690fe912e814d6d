"""The adapter contract on S3 by SeaweedFS, which checks signatures; through TLS in `make nightly`."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import ResourceError
from lmcache.l2.adapter import Adapter
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.l2.adapters import s3, s3_listing
from lmcache.l2.adapters.s3_client import PART_BYTES, SINGLE_PUT_BYTES
from lmcache.testing.adapter_contract import AdapterContract, RecordingInventory, build_from
from lmcache.testing.frames import FrameMemory, keys
from lmcache.testing.processes import LOOPBACK
from services import need_package
from services.certificates import Certificates
from services.seaweedfs import ACCESS_KEY, REGION, SECRET_KEY, SeaweedFS
from support.encoded_adapter import AESGCM, EncodedContract

need_package("awscrt")

BUCKET = "lmcache"


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    folder = tmp_path_factory.mktemp("seaweedfs")
    with SeaweedFS(folder / "server", certificates=Certificates(folder / "certificates")) as server:
        server.wait_ready()
        yield server


def specification(endpoint: str, **keys: Any) -> dict[str, Any]:
    credentials = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}
    return {"type": "s3", "s3_endpoint": endpoint, "s3_region": REGION, **credentials, **keys}


class S3Contract(AdapterContract):
    """Each folder is a prefix of its own."""

    __test__ = False
    after_restart = "listed"  # a bucket knows when an object was stored, not when it was used
    keeps_prefix_order = False
    steps = 500
    most_steps = 5000
    server: SeaweedFS
    settings: Mapping[str, Any] = {}

    @pytest.fixture(autouse=True)
    def _use(self, server: SeaweedFS) -> None:
        type(self).server = server
        server.make_bucket(BUCKET)

    @property
    def endpoint(self) -> str:
        return f"http://{LOOPBACK}:{self.server.port}/{BUCKET}"

    def build(self, folder: Path) -> Adapter:
        prefix = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        return build_from(specification(self.endpoint, prefix=prefix, **self.settings), folder)

    def break_backend(self, folder: Path) -> bool:
        return self.server.call("DELETE", f"/{BUCKET}").status == 204


class TestS3(S3Contract):
    __test__ = True

    def test_large_objects_are_moved_in_parts(self, tmp_path: Path) -> None:
        """Beyond what one request stores, with lengths that are no multiple of a part."""
        payloads_bytes = (PART_BYTES - 4096, PART_BYTES, SINGLE_PUT_BYTES + 12_345)

        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            for number, payload_bytes in enumerate(payloads_bytes):
                memory, target = FrameMemory(1, payload_bytes), FrameMemory(1, payload_bytes)
                key = keys(1, seed=number)[0]
                frame = [memory.fill(0, key)]
                assert await adapter.store([key], frame) == [StoreOutcome.STORED]
                assert await adapter.store([key], frame) == [StoreOutcome.ALREADY_THERE]
                assert await adapter.probe([key]) == [memory.slot_bytes]
                assert await adapter.load([key], target.buffers) == [LoadOutcome.LOADED]
                assert bytes(target.buffers[0]) == bytes(memory.buffers[0])

        self.run(tmp_path, test)

    def test_a_listing_of_several_pages(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (s3, s3_listing):
            monkeypatch.setattr(module, "PAGE_OBJECTS", 40)
        wanted = keys(100)

        async def fill(adapter: Adapter, _: RecordingInventory) -> None:
            memory = FrameMemory(100, 100)
            frames = [memory.fill(slot, key) for slot, key in enumerate(wanted)]
            assert await adapter.store(wanted, frames) == [StoreOutcome.STORED] * 100

        async def look(adapter: Adapter, inventory: RecordingInventory) -> None:
            slot_bytes = FrameMemory(1, 100).slot_bytes
            assert inventory.objects == dict.fromkeys(wanted, slot_bytes)
            assert await adapter.clear() == (len(wanted), len(wanted) * slot_bytes)

        self.run(tmp_path, fill)
        self.run(tmp_path, look)

    def test_tls_is_checked_and_http2_may_be_offered(self, tmp_path: Path) -> None:
        def life(**keys_of_tls: Any) -> None:
            asyncio.run(one_life(specification(f"https://{LOOPBACK}:{self.server.tls_port}/{BUCKET}", **keys_of_tls)))

        assert self.server.certificates is not None
        authority = str(self.server.certificates.ca)
        context = ssl.create_default_context(cafile=authority)
        context.set_alpn_protocols(["h2", "http/1.1"])
        with (
            socket.create_connection((LOOPBACK, self.server.tls_port)) as plain,
            context.wrap_socket(plain, server_hostname=LOOPBACK) as connection,
        ):
            assert connection.selected_alpn_protocol() == "h2"  # so what follows goes by either protocol
        for prefer_http2 in (True, False):
            life(tls_ca=authority, s3_prefer_http2=prefer_http2)
        with pytest.raises(ResourceError, match=r"is not trusted \(.*\); see tls_ca"):
            life(timeout_seconds=4)  # the system knows no such authority
        with pytest.raises(ResourceError, match="tls_ca"):
            life(tls_ca="/nowhere/ca.pem")


class TestS3WithSerde(EncodedContract, S3Contract):
    __test__ = True
    serde = AESGCM


def test_the_bucket_in_the_host_and_in_the_path(tmp_path: Path) -> None:
    """The document's line for MinIO, and what else an endpoint may be."""
    with SeaweedFS(tmp_path / "server", domain="0.0.1") as service:
        service.wait_ready()
        service.make_bucket("127")  # so that 127.0.0.1 is a host of a bucket
        host = f"{LOOPBACK}:{service.port}"
        for keys_of_style in ({}, {"s3_addressing_style": "virtual"}):
            asyncio.run(one_life(specification(host, disable_tls=True, **keys_of_style)))


def test_a_host_without_a_bucket_has_one_of_the_default_name(server: SeaweedFS) -> None:
    server.make_bucket(BUCKET)
    asyncio.run(one_life(specification(f"{LOOPBACK}:{server.port}", disable_tls=True)))


async def one_life(spec: dict[str, Any]) -> None:
    """Stores, loads and deletes an object."""
    adapter = build(parse_adapter(spec, 0)).adapter
    try:
        await adapter.open(RecordingInventory())
        memory, target = FrameMemory(1), FrameMemory(1)
        wanted = keys(1, seed=77)
        assert await adapter.store(wanted, [memory.fill(0, wanted[0])]) == [StoreOutcome.STORED]
        assert await adapter.load(wanted, target.buffers) == [LoadOutcome.LOADED] and target.holds(0, wanted[0])
        assert await adapter.clear() == (1, memory.slot_bytes)
    finally:
        await adapter.close()


@pytest.mark.slow
class TestS3ThroughTls(S3Contract):
    __test__ = True

    @property
    def endpoint(self) -> str:
        self.settings = {"tls_ca": str(self.server.certificates.ca)}
        return f"https://{LOOPBACK}:{self.server.tls_port}/{BUCKET}"
