"""raw_block against the contract: both engines, with and without O_DIRECT, other geometries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lmcache.l2.adapter import Adapter
from lmcache.testing.adapter_contract import AdapterContract, adapter_contract, build_from
from support.encoded_adapter import AESGCM, EncodedContract

DEVICE_BYTES = 256 << 20  # sparse
SLOT_BYTES = (1 << 20) + (64 << 10)


def on_a_file(**settings: object) -> Callable[[Path], Adapter]:
    def build(folder: Path) -> Adapter:
        path = folder / "device"
        if not path.exists():
            with path.open("wb") as file:
                file.truncate(DEVICE_BYTES)
        spec = {"type": "raw_block", "device_path": str(path), "slot_bytes": SLOT_BYTES, "meta_total_bytes": 262144}
        return build_from({**spec, **settings}, folder)

    return build


class TestRawBlock(AdapterContract):
    after_restart = "told"
    steps = 1000

    def build(self, folder: Path) -> Adapter:
        return on_a_file()(folder)


TestIoUring = adapter_contract(on_a_file(io_engine="io_uring", iouring_queue_depth=3), after_restart="told", steps=1000)
TestPageCache = adapter_contract(on_a_file(use_odirect=False, block_align=512), after_restart="told")
TestCopies = adapter_contract(
    on_a_file(enable_zero_copy=False, num_store_workers=1, num_load_workers=1), after_restart="told", steps=1000
)
TestLargeBlocks = adapter_contract(
    on_a_file(block_align=8192, header_bytes=8192, io_engine="io_uring"), after_restart="told", steps=1000
)


class TestWithSerde(EncodedContract, TestRawBlock):
    serde = AESGCM
