"""Plain programs on NIXL: an agent, and files or objects that are registered with it before anything is measured."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmcache import _native
from lmcache.errors import LMCacheError
from lmcache.l2.adapters import nixl_agent
from lmcache.l2.adapters.nixl_config import NixlConfig, NixlStoreConfig


class _Nixl:
    """`_targets`: what each piece is moved to and from, as NIXL describes it."""

    name = "Plain NIXL"
    _kind: Any
    _targets: list[int]

    def __init__(self, config: NixlConfig) -> None:
        self._nixl = nixl = nixl_agent.load_bindings(config.where)
        self._where = config.where
        self._agent_name = f"plain-{uuid.uuid4().hex}"
        settings = nixl.nixlAgentConfig(False, False, 0, nixl.NIXL_THREAD_SYNC_NONE)
        self._agent = nixl.nixlAgent(self._agent_name, settings)
        parameters = {"ios_pool_size": "1024"} if config.backend == "POSIX" else {}
        self._backend = self._agent.createBackend(config.backend, {**parameters, **config.plugin_params})
        self._known: set[int] = set()  # addresses that are registered

    def write(self, pieces: Sequence[memoryview]) -> None:
        self._move(self._nixl.NIXL_WRITE, pieces)

    def read(self, pieces: Sequence[memoryview]) -> None:
        self._move(self._nixl.NIXL_READ, pieces)

    def clean_up(self) -> None:
        """Its files stay open until the end, as those of a pool do; objects cannot be deleted through NIXL."""

    def _move(self, operation: Any, pieces: Sequence[memoryview]) -> None:
        places = [(_native.buffer_address(piece), piece.nbytes, 0) for piece in pieces]
        new = [place for place in places if place[0] not in self._known]
        if new:
            self._register(self._nixl.DRAM_SEG, [(*place, "") for place in new])
            self._known.update(place[0] for place in new)
        targets = [(0, piece.nbytes, target) for piece, target in zip(pieces, self._targets, strict=True)]
        self._finish([self._begin(operation, *part) for part in self._transfers(places, targets)])

    def _transfers(self, places: list[Any], targets: list[Any]) -> list[tuple[list[Any], list[Any]]]:
        """All in one transfer."""
        return [(places, targets)]

    def _begin(self, operation: Any, places: list[Any], targets: list[Any]) -> tuple[int, Any]:
        nixl = self._nixl
        handle = self._agent.createXferReq(
            operation,
            nixl.nixlXferDList(nixl.DRAM_SEG, places),
            nixl.nixlXferDList(self._kind, targets),
            self._agent_name,
            "",
            [self._backend],
        )
        return handle, self._agent.postXferReq(handle)

    def _finish(self, begun: list[tuple[int, Any]]) -> None:
        nixl, statuses = self._nixl, set()
        for handle, status in begun:
            while status == nixl.NIXL_IN_PROG:
                time.sleep(20e-6)
                status = self._agent.getXferStatus(handle)
            self._agent.releaseXferReq(handle)
            statuses.add(status)
        if statuses != {nixl.NIXL_SUCCESS}:
            raise LMCacheError(f"{self._where}: a plain transfer of NIXL failed: {statuses - {nixl.NIXL_SUCCESS}}.")

    def _register(self, kind: Any, descriptors: list[tuple[int, int, int, str]]) -> None:
        self._agent.registerMem(self._nixl.nixlRegDList(kind, descriptors), [self._backend])


class PlainNixl(_Nixl):
    """Files that are open, and one transfer for all of them."""

    def __init__(self, config: NixlConfig, objects: int) -> None:
        super().__init__(config)
        folder = Path(config.folder) / "plain"
        folder.mkdir(exist_ok=True)
        self._kind = self._nixl.FILE_SEG
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if config.use_odirect else 0)
        self._targets = [os.open(folder / str(index), flags, 0o600) for index in range(objects)]
        self._register(self._kind, [(0, nixl_agent.MAX_FILE_BYTES, file, "") for file in self._targets])
        cache = "O_DIRECT" if config.use_odirect else "page cache"
        self.how = f"{config.backend}, files open already, {cache}"

    def close(self) -> None:
        del self._agent
        for file in self._targets:
            os.close(file)


class PlainNixlObjects(_Nixl):
    """A transfer for each object, all of them at once."""

    def __init__(self, config: NixlStoreConfig, objects: int) -> None:
        super().__init__(config)
        self._kind = self._nixl.OBJ_SEG
        self._targets = list(range(objects))
        names = [f"{config.object_prefix}/bench-plain/{index}" for index in self._targets]
        self._register(self._kind, [(0, 0, at, name) for at, name in enumerate(names)])
        self.how = f"{config.backend}, all objects at once"

    def _transfers(self, places: list[Any], targets: list[Any]) -> list[tuple[list[Any], list[Any]]]:
        return [([place], [target]) for place, target in zip(places, targets, strict=True)]

    def close(self) -> None:
        del self._agent
