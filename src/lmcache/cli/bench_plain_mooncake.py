"""A plain program on Mooncake Store: a client of its own that gives no memory, and one batch for all objects."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

from lmcache import _native
from lmcache.errors import LMCacheError
from lmcache.l2.adapters.mooncake_client import CLIENT_ENDS, load_package
from lmcache.l2.adapters.mooncake_config import MooncakeConfig


class PlainMooncake:
    name = "Plain Mooncake"

    def __init__(self, config: MooncakeConfig) -> None:
        self._where = config.where
        self._names: list[str] = []
        self._prefix = f"{config.prefix}/bench-{uuid.uuid4().hex}"
        self._registered: set[int] = set()
        self._store = load_package(config.where)()
        if self._store.setup({**config.setup_keys, "global_segment_size": "0"}):
            raise LMCacheError(f"{config.where}: the plain program cannot connect; Mooncake's lines above say why.")
        CLIENT_ENDS.begun(self._store)
        self.how = f"one batch, {config.protocol}"

    def write(self, pieces: Sequence[memoryview]) -> None:
        self._names = [f"{self._prefix}/{index}" for index in range(len(pieces))]
        self._move("put", self._store.batch_put_from, pieces)

    def read(self, pieces: Sequence[memoryview]) -> None:
        self._move("get", self._store.batch_get_into, pieces)

    def clean_up(self) -> None:
        self._store.batch_remove(self._names, True)

    def close(self) -> None:
        for address in self._registered:
            self._store.unregister_buffer(address)
        CLIENT_ENDS.end(self._store, is_last=False)

    def _move(
        self, act: str, move: Callable[[list[str], list[int], list[int]], list[int]], pieces: Sequence[memoryview]
    ) -> None:
        addresses, sizes = [_native.buffer_address(piece) for piece in pieces], [piece.nbytes for piece in pieces]
        for address, size_bytes in zip(addresses, sizes, strict=True):
            if address not in self._registered:
                self._store.register_buffer(address, size_bytes)
                self._registered.add(address)
        faults = [code for code in move(self._names, addresses, sizes) if code < 0]
        if faults:
            raise LMCacheError(f"{self._where}: a plain {act} was answered with fault {faults[0]}.")
