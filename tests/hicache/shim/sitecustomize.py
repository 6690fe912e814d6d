"""What SGLang lacks on a machine without a GPU, put in place when Python starts.

Its kernels (`sgl_kernel`) and torchvision are not installed: their names can be imported, and used by nothing that is
called here. Copies between device and host pools, which it has as CUDA kernels, are made by torch.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

STUBS = ("sgl_kernel", "torchvision")


class NamesOfItsOwn(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Stub(metaclass=NamesOfItsOwn):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        raise RuntimeError(f"{type(self).__name__} is not installed: this stands in for it")

    def __class_getitem__(cls, item: Any) -> type:
        return cls


class StubModule(ModuleType):
    __path__: list[str] = []
    __version__ = "0.0"

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Stub,), {})


def copy_all_layers(
    src_ptrs: Sequence[Any], dst_ptrs: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Tokens of each layer of the device pool into pages of the host pool [page][layer][token]."""
    layers = len(src_ptrs) // len(dst_ptrs)
    pages = dst_indices[::page_size] // page_size
    for kind, host in enumerate(dst_ptrs):
        for layer in range(layers):
            rows = src_ptrs[kind * layers + layer][src_indices]
            host[pages, layer] = rows.view(len(pages), page_size, *rows.shape[1:]).view(host.dtype)


def copy_layer(
    src_ptrs: Sequence[Any],
    dst_ptrs: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    """The other way, one layer."""
    pages = src_indices[::page_size] // page_size
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        rows = host[pages, layer_id]
        device[dst_indices] = rows.reshape(len(dst_indices), *rows.shape[2:]).view(device.dtype)


# After these modules have run, these names of theirs are replaced.
REPLACED: dict[str, dict[str, Any]] = {
    "sglang.srt.mem_cache.pool_host.base": {"HICACHE_HOST_MEMORY_RESERVE_BYTES": 0},
    "sglang.srt.mem_cache.pool_host.common": {"_cuda_host_register": lambda *arguments, **keywords: None},
    "sglang.srt.mem_cache.pool_host.mha": {
        "transfer_kv_all_layer_direct_lf_pf": copy_all_layers,
        "transfer_kv_per_layer_direct_pf_lf": copy_layer,
    },
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in STUBS:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if fullname not in REPLACED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_replace(module: ModuleType) -> None:
                run(module)
                vars(module).update(REPLACED[fullname])

            setattr(spec.loader, "exec_module", run_and_replace)  # noqa: B010
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, Finder())
