"""One page at a time in memory of our own, for callers that have a page as a tensor and not in a host pool."""

from __future__ import annotations

import mmap
import threading
from array import array
from collections.abc import Callable
from typing import Any

from lmcache import _native
from lmcache.device.cpu import PagedGroup
from lmcache.integration.sglang.page_memory import flat_pages
from lmcache.integration.sglang.page_pool import PagePool

_PAGE_0 = array("q", [0]).tobytes()


class FlatPage:
    """Thread-safe. Tensors are contiguous, in host memory, and have the bytes of a page; others are misses."""

    def __init__(self, group: PagedGroup, make_pool: Callable[[PagedGroup], PagePool]) -> None:
        """`group`: the host pool whose pages these are too."""
        page_bytes = sum(layer.content_bytes for layer in group.layers)
        self._memory = mmap.mmap(-1, page_bytes)
        self._address = _native.buffer_address(self._memory)
        self._pool = make_pool(flat_pages(group, self._address, 1))
        self._lock = threading.Lock()

    def get(self, page_hash: bytes, tensor: Any) -> bool:
        """Whether the tensor holds the page now."""
        if not self._fits(tensor):
            return False
        with self._lock:
            if not self._pool.load(page_hash, _PAGE_0)[0]:
                return False
            _native.copy_plain(tensor.data_ptr(), self._address, self._pool.page_bytes)
            return True

    def set(self, page_hash: bytes, tensor: Any) -> bool:
        """Whether the server has the page now."""
        if not self._fits(tensor):
            return False
        with self._lock:
            _native.copy_plain(self._address, tensor.data_ptr(), self._pool.page_bytes)
            return self._pool.store(page_hash, _PAGE_0)[0]

    def close(self) -> None:
        with self._lock:
            self._pool.close()

    def _fits(self, tensor: Any) -> bool:
        if tensor is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return False
        return bool(tensor.numel() * tensor.element_size() == self._pool.page_bytes)
