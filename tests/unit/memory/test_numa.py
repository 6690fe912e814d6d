"""Placement of L1 on NUMA nodes: what is written, and where the kernel then takes the pages."""

from __future__ import annotations

import ctypes
import os
import platform
from collections import Counter
from collections.abc import Sequence

import pytest

from lmcache.errors import ConfigError
from lmcache.memory import numa
from lmcache.memory.server_memory import ServerMemory

PAGE_BYTES = 4096
SIZE_BYTES = 4 << 20
MOVE_PAGES = {"x86_64": 279, "aarch64": 239}


def nodes_of(addresses: Sequence[int]) -> Counter[int]:
    """How many of these pages lie on each node, by a negative errno for those that lie nowhere."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = (ctypes.c_void_p * len(addresses))(*addresses)
    found = (ctypes.c_int * len(addresses))()
    number, none = ctypes.c_long(MOVE_PAGES[platform.machine()]), ctypes.c_void_p(None)
    failed = libc.syscall(number, ctypes.c_int(0), ctypes.c_ulong(len(addresses)), pages, none, found, ctypes.c_int(0))
    assert failed >= 0, os.strerror(ctypes.get_errno())
    return Counter(found)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("0", (0,)), ("0-3", (0, 1, 2, 3)), ("5,0-1", (0, 1, 5)), ("1,1,0-1", (0, 1)), ("1023", (1023,))],
)
def test_node_lists_are_read_as_the_kernel_writes_them(text: str, nodes: tuple[int, ...]) -> None:
    assert numa.parse_nodes(text) == nodes


@pytest.mark.parametrize("text", ["", "a", "0-", "-1", "3-1", "0,,1", "1024", "0-99999", "0 1"])
def test_what_is_no_list_of_nodes(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        numa.parse_nodes(text)


@pytest.mark.parametrize("text", ["bind", "bind:", "0", "spread", "interleave:x", "bind:1000", "Bind:0"])
def test_what_is_refused_names_the_option_and_what_it_may_be(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--l1-numa .*(such as|it has)"):
        numa.placement(text)
    assert numa.placement("") is None


@pytest.mark.parametrize("text", ["interleave", "bind:{first}", "bind:{last}", "interleave:{first}"])
def test_pages_are_where_they_were_wanted(text: str) -> None:
    online = numa.online_nodes()
    wanted = numa.placement(text.format(first=online[0], last=online[-1]))
    assert wanted is not None
    memory = ServerMemory.create(f"lmcache-test-numa-{os.getpid()}", SIZE_BYTES, bytes(16))
    try:
        memory.place(wanted)
        memory.grow(SIZE_BYTES)
        memory.prefault(0, SIZE_BYTES, 1, large_pages=False)
        pages = nodes_of(range(memory.address + PAGE_BYTES, memory.address + SIZE_BYTES, PAGE_BYTES))
        assert set(pages) <= set(wanted.nodes), pages
        assert sum(pages.values()) == SIZE_BYTES // PAGE_BYTES - 1
        if wanted.interleave:
            assert max(pages.values()) - min(pages[node] for node in wanted.nodes) <= SIZE_BYTES // PAGE_BYTES // 8
    finally:
        memory.close()
