"""How a worker's frames travel to and from one server: the interface of the ways there are, and what they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache import _native
from lmcache.client.engine_environment import ENGINE_SYSTEM, EngineEnvironment
from lmcache.core.key import accepting_layout
from lmcache.core.layout import KVLayout
from lmcache.device.cpu import PagedGroup
from lmcache.device.cuda import Gpu
from lmcache.integration.engine.connector_metadata import LoadOrder, StoreOrder
from lmcache.integration.engine.frame_names import WorkerIdentity
from lmcache.protocol.messages import ReserveReply

# What a job's result says of each chunk.
COPIED = 1
UNREADABLE = 0  # a load's frame is not what its key says
NOT_FETCHED = 2  # a load's frame did not come, or its GPU did not take it: nothing is known of it


class TransferJob(Protocol):
    """A part of an order under way."""

    def wait(self, seconds: float) -> bytes | None:
        """One byte a chunk, COPIED if all went well; None while it runs."""
        ...


class TransferBackend(Protocol):
    """One worker's transfers with one server, until that server's epoch ends. `submit_*` give a job for each group of
    the order, in their order, and raise StaleServer once the backend is closed. `close` returns when no copy touches
    the engine's blocks any more; idempotent.

    A load writes no block before `fence`. The KV of a store has been computed."""

    server_epoch: bytes
    layouts: tuple[KVLayout, ...]

    def submit_load(self, order: LoadOrder, fence: _native.CudaFence | None) -> Sequence[TransferJob]: ...
    def submit_store(self, order: StoreOrder, reply: ReserveReply) -> Sequence[TransferJob]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class WorkerKV:
    """A worker's KV memory, and who the worker is. `gpu`: where the memory is, unless in the host's."""

    identity: WorkerIdentity
    groups: tuple[PagedGroup, ...]
    threads: int  # that copy
    gpu: Gpu | None
    environment: EngineEnvironment = ENGINE_SYSTEM

    def layouts(self, chunk_tokens: int) -> tuple[KVLayout, ...]:
        """The layout of each group. LayoutRefused when the server's chunks do not fit this engine's blocks."""
        return tuple(group.layout(chunk_tokens) for group in self.groups)

    def layout_names(self, layouts: Sequence[KVLayout]) -> list[str]:
        """What namespaces call the layout of each group."""
        accepted = self.identity.lossy_serde
        return [
            accepting_layout(layout.fingerprint, accepted if group.may_be_approximate else "")
            for group, layout in zip(self.groups, layouts, strict=True)
        ]

    def copier(
        self, layouts: Sequence[KVLayout], address: int, size_bytes: int
    ) -> tuple[_native.PagedCopier, tuple[int, ...]]:
        """Copies between the groups' blocks and frames in the memory at `address`; its numbers of the groups."""
        copier = self.environment.copier(
            address, size_bytes, self.threads, self.gpu.copy_methods if self.gpu is not None else None
        )
        numbers = tuple(
            copier.add_group(group.segments, layout.blocks_per_chunk, group.num_blocks)
            for group, layout in zip(self.groups, layouts, strict=True)
        )
        return copier, numbers
