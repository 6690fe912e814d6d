"""A host pool of SGLang as paged memory: where the bytes of each page lie, as the pool itself tells.

The content of a page is copied as opaque bytes, buffer by buffer in the order in which the pool names them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lmcache.core.layout import LayerLayout
from lmcache.device.cpu import PagedGroup, Segment
from lmcache.errors import LayoutRefused

# What gives the bytes of a page their meaning, beside their number; a pool has some of them.
_GEOMETRY = (
    *("start_layer", "end_layer", "layer_num", "head_num", "head_dim", "v_head_dim"),
    *("kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "dtype", "store_dtype", "storage_format_tag"),
)
_Buffer = tuple[int, int]  # (address, bytes)


def describe_pool(pool: Any, name: str, identity: str) -> PagedGroup:
    """The pages of a pool in host memory. LayoutRefused names what cannot be copied exactly.

    `identity`: of engine and weights."""
    page_tokens = int(pool.page_size)
    pages = int(pool.size) // page_tokens
    if getattr(pool, "shared_allocation_domain", None) is not None:
        raise LayoutRefused(f"The pages of the host pool {name!r} move while they are in use.")
    if getattr(pool, "dcp_size", 1) != 1:
        raise LayoutRefused(f"The host pool {name!r} is split by decode context parallelism, which is not served.")
    if pages < 1:
        raise LayoutRefused(f"The host pool {name!r} has {pool.size} tokens, less than a page of {page_tokens}.")
    first = _buffers(pool, name, 0)
    segments: list[Segment] = []
    second = _buffers(pool, name, 1) if pages > 1 else [(address + size, size) for address, size in first]
    for (address, size_bytes), (next_address, _) in zip(first, second, strict=True):
        segments.append((address, next_address - address, size_bytes, ()))
    for page in {1, pages // 2, pages - 1} if pages > 1 else ():
        expected = [(address + page * stride, size) for address, stride, size, _ in segments]
        if _buffers(pool, name, page) != expected or any(stride < size for _, stride, size, _ in segments):
            raise LayoutRefused(f"The pages of the host pool {name!r} do not lie at equal distances.")
    layers = [LayerLayout(f"buffer{index}", "uint8", (size,), (1,), size) for index, (_, size) in enumerate(first)]
    return PagedGroup(
        engine=f"{identity} {_meaning(pool, name)}",
        block_tokens=page_tokens,
        num_blocks=pages,
        layers=tuple(layers),
        segments=tuple(segments),
        is_page=True,
    )


def flat_pages(group: PagedGroup, address: int, pages: int) -> PagedGroup:
    """The same pages, in memory where they lie one behind the other with their buffers one behind the other."""
    page_bytes = sum(layer.content_bytes for layer in group.layers)
    segments: list[Segment] = []
    for layer in group.layers:
        segments.append((address, page_bytes, layer.content_bytes, ()))
        address += layer.content_bytes
    return replace(group, num_blocks=pages, segments=tuple(segments))


def _buffers(pool: Any, name: str, page: int) -> list[_Buffer]:
    import torch

    tokens = torch.arange(page * pool.page_size, (page + 1) * pool.page_size, dtype=torch.int64)
    try:
        addresses, sizes = pool.get_page_buffer_meta(tokens)
    except (AttributeError, NotImplementedError, ValueError) as error:
        raise LayoutRefused(
            f"The host pool {name!r} with the layout {getattr(pool, 'layout', '')!r} does not tell where its pages lie "
            f"({error}): start SGLang with --hicache-mem-layout page_first or page_first_direct."
        ) from error
    return [(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]


def _meaning(pool: Any, name: str) -> str:
    device_pool = getattr(pool, "device_pool", None)
    fields = [f"{field}={getattr(pool, field)}" for field in _GEOMETRY if getattr(pool, field, None) is not None]
    logical_dtype = getattr(device_pool, "dtype", None)
    return " ".join((type(pool).__name__, name, str(getattr(pool, "layout", "")), *fields, f"of={logical_dtype}"))


def pages_of(host_indices: Any, page_tokens: int, count: int) -> bytes | None:
    """Packed i64 page numbers of `count` whole pages; None where the indices are not that."""
    indices: Sequence[int] = host_indices.tolist() if host_indices is not None else ()
    if len(indices) != count * page_tokens:
        return None
    first, last = indices[::page_tokens], indices[page_tokens - 1 :: page_tokens]
    if any(start % page_tokens or end - start != page_tokens - 1 for start, end in zip(first, last, strict=True)):
        return None
    return array("q", [start // page_tokens for start in first]).tobytes()
