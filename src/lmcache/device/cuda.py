"""KV tensors in the memory of an NVIDIA GPU: what their blocks are, and pinned memory to copy them to and from.

Blocks are opaque bytes here too. What engines lay out otherwise on a GPU is brought into the shape that `cpu`
describes: the block id first. All of CUDA is behind the native core, which opens the driver at run time.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lmcache import _native
from lmcache.core.limits import MIB
from lmcache.device.cpu import PagedGroup, describe_group
from lmcache.errors import LayoutRefused, ResourceError

if TYPE_CHECKING:
    import torch

    from lmcache.memory.engine_memory import EngineMemory

log = logging.getLogger("lmcache.device")

DRIVER = "libcuda.so.1"
_TRIAL_BYTES = 16 * MIB  # of GPU memory, for a moment
# Pinning holds up other calls of the driver, and a frame that reaches from one piece into the next is copied twice.
PIECE_BYTES = 512 * MIB
LOOK_SECONDS = 0.2


def describe_gpu_group(
    tensors: Sequence[tuple[str, torch.Tensor]],
    *,
    engine: str,
    block_tokens: int,
    num_blocks: int,
    device_type: str = "cuda",
) -> PagedGroup:
    """`describe_group` for the layouts of GPU engines: (blocks, heads, tokens, content) and (blocks, tokens, content)
    in any order in memory, K and V or heads in planes of their own, blocks cut into several for the kernels."""
    if num_blocks <= 2:
        raise LayoutRefused(f"With {num_blocks} KV blocks, blocks cannot be told from keys and values.")
    views = [view for name, tensor in tensors for view in _blocks_first(name, tensor, num_blocks, block_tokens)]
    return describe_group(
        views, engine=engine, block_tokens=block_tokens, num_blocks=num_blocks, device_type=device_type
    )


def _blocks_first(
    name: str, tensor: torch.Tensor, num_blocks: int, block_tokens: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the tensor whose first dimension is the block id and whose blocks do not lie inside one another."""
    if tensor.dim() > 2 and tensor.shape[0] != num_blocks and tensor.shape[1] == num_blocks:
        for plane in range(tensor.shape[0]):
            yield from _blocks_first(f"{name}[{plane}]", tensor[plane], num_blocks, block_tokens)
        return
    cut = tensor.shape[0] // num_blocks if tensor.shape[0] % num_blocks == 0 else 1
    if cut == 0 or block_tokens % cut or block_tokens // cut not in tensor.shape[1:]:
        raise LayoutRefused(
            f"{name} has shape {tuple(tensor.shape)}: {num_blocks} blocks of {block_tokens} tokens are not in it."
        )
    if cut > 1:
        tensor = tensor.unflatten(0, (num_blocks, cut))
    yield from _planes(name, tensor)


def _planes(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A dimension that steps over all blocks is no part of a block: one view for each of its positions."""
    for dim in range(1, tensor.dim()):
        if (
            tensor.shape[dim] > 1
            and tensor.stride(dim) > tensor.stride(0) > 0
            and tensor.stride(dim) >= tensor.shape[0] * tensor.stride(0)
        ):
            for plane in range(tensor.shape[dim]):
                yield from _planes(f"{name}[{plane}]", tensor.select(dim, plane))
            return
    yield name, tensor


class Gpu:
    """The GPU of one worker, until it ends. Thread-safe."""

    def __init__(
        self,
        groups: Sequence[PagedGroup],
        ordinal: int,
        *,
        library: str = DRIVER,
        current_stream: Callable[[], int] | None = None,
        trial_bytes: int = _TRIAL_BYTES,
    ) -> None:
        """LayoutRefused says in a sentence why the GPU cannot be used. `ordinal`: as the engine counts its devices.
        `current_stream`: the stream that the calling thread launches on, torch's unless given."""
        self._ordinal = ordinal
        runs: Counter[int] = Counter()
        for group in groups:
            runs.update(segment[2] for segment in group.segments)
        try:
            self._device = _native.CudaDevice(library, ordinal)
            self.copy_methods = _native.CudaCopyMethods(self._device, runs.most_common(1)[0][0], trial_bytes)
        except RuntimeError as error:
            raise LayoutRefused(f"KV cannot be copied from this GPU: {error}.") from error
        self._current_stream = current_stream or _torch_stream(ordinal)
        tried = ", ".join(f"{method} {store:.1f}/{load:.1f}" for method, store, load in self.copy_methods.trials)
        log.info(
            "KV is copied to and from GPU %d by %s copies (store/load GB/s: %s; one large copy: %.1f)",
            *(ordinal, self.copy_methods.best, tried, self.copy_methods.one_copy_gb_per_second),
        )

    @property
    def address(self) -> str:
        """On the PCI bus, as sysfs writes it; "" where torch does not tell."""
        import torch

        if not torch.cuda.is_available():
            return ""
        properties: Any = torch.cuda.get_device_properties(self._ordinal)
        if not hasattr(properties, "pci_bus_id"):
            return ""
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"

    def fence(self) -> _native.CudaFence:
        """The end of what this thread has launched so far. ResourceError when the device has failed."""
        try:
            return self._device.fence(self._current_stream())
        except RuntimeError as error:
            raise ResourceError(f"The GPU does not answer: {error}.") from error

    def take_failure(self) -> str:
        """Why a copy has failed since the last call; "" if none has."""
        return self._device.take_failure()

    def pin(self, memory: EngineMemory) -> Pinning:
        return Pinning(self._device, memory.address, memory.size_bytes, memory.present_bytes)

    def pin_buffer(self, address: int, size_bytes: int) -> Pinning:
        return Pinning(self._device, address, size_bytes, lambda: size_bytes)


class Pinning:
    """Pins memory in the background as it comes to be there. Copies go through a buffer of the copier's own until then,
    and for good where the driver refuses."""

    def __init__(
        self, device: _native.CudaDevice, address: int, size_bytes: int, present_bytes: Callable[[], int]
    ) -> None:
        """`present_bytes`: how much there is, from the start; pinning what is not there would make it."""
        self._device = device
        self._address = address
        self._size_bytes = size_bytes
        self._present_bytes = present_bytes
        self.pinned_bytes = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lmcache-pin", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            previous_bytes = -1
            while self.pinned_bytes < self._size_bytes:
                present_bytes = self._present_bytes()
                piece_bytes = min(PIECE_BYTES, present_bytes - self.pinned_bytes)
                # A whole piece, or what there is once it has stopped to grow.
                if piece_bytes == PIECE_BYTES or (
                    piece_bytes > 0 and present_bytes in (previous_bytes, self._size_bytes)
                ):
                    self._device.register_memory(self._address + self.pinned_bytes, piece_bytes)
                    self.pinned_bytes += piece_bytes
                    pause_seconds = 0.0
                else:
                    pause_seconds = LOOK_SECONDS
                previous_bytes = present_bytes
                if self._closed.wait(pause_seconds):
                    return
        except RuntimeError as error:
            log.warning(
                "Only %d of %d MiB could be pinned (%s): copies beyond go through a buffer, which is slower",
                *(self.pinned_bytes // MIB, self._size_bytes // MIB, error),
            )
        except Exception:  # the root of a thread
            log.exception("Pinning memory ended")

    def wait(self, seconds: float) -> None:
        """Until everything is pinned, or the driver has refused, or the time is over."""
        self._thread.join(seconds)

    def close(self) -> None:
        """No copy may touch the memory any more. Idempotent."""
        self._closed.set()
        self._thread.join()
        self._device.unregister_memory(self._address, self._size_bytes)


def _torch_stream(ordinal: int) -> Callable[[], int]:
    import torch

    return lambda: int(torch.cuda.current_stream(ordinal).cuda_stream)
