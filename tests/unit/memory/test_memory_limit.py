"""What the machine grants is read from the kernel's files; here those are made up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmcache.core.limits import GIB, L1_MEMORY_MARGIN_BYTES
from lmcache.errors import ResourceError
from lmcache.memory.hugepages import find_hugepages
from lmcache.memory.memory_limit import MemoryProbe, refuse_if_impossible, refuse_if_short

HUGE = 1 << 50


def make_probe(folder: Path, *, available_kib: int = HUGE, cgroup: str = "") -> MemoryProbe:
    proc = folder / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {available_kib} kB\nBuffers: 2 kB\n")
    (proc / "self/cgroup").write_text(cgroup)
    root = folder / "cgroup"
    root.mkdir()
    return MemoryProbe(proc, root)


def write_v2(folder: Path, maximum: str, current: int, inactive_file: int = 0, active_file: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{maximum}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\nactive_file {active_file}\n")


def left_by(probe: MemoryProbe, source: str, directory: Path) -> list[int]:
    return [limit.available_bytes for limit in probe.available_limits(directory) if source in limit.source]


def test_memory_that_is_available_bounds_l1_less_a_margin(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, available_kib=4 * GIB // 1024)
    assert left_by(probe, "this machine", tmp_path) == [4 * GIB - L1_MEMORY_MARGIN_BYTES]
    with pytest.raises(
        ResourceError, match=r"L1 needs 4\.00 GiB, but this machine's memory leaves 3\.75 GiB; .*--l1-size-gb"
    ):
        refuse_if_short(4 * GIB, tmp_path, probe, "L1")
    refuse_if_short(4 * GIB - L1_MEMORY_MARGIN_BYTES, tmp_path, probe, "L1")


def test_a_small_file_system_bounds_l1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = make_probe(tmp_path)
    status = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: status)  # others write to this file system meanwhile
    assert left_by(probe, str(tmp_path), tmp_path) == [status.f_bavail * status.f_frsize]
    with pytest.raises(ResourceError, match=f"but {tmp_path} leaves .*enlarge it"):
        refuse_if_short(1 << 60, tmp_path, probe, "L1")


def test_the_tightest_cgroup_around_counts_and_page_cache_is_free(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, cgroup="0::/outer/inner\n")
    write_v2(tmp_path / "cgroup", "max", 0)
    write_v2(tmp_path / "cgroup/outer", str(3 * GIB), 2 * GIB, inactive_file=GIB // 2, active_file=GIB // 4)
    write_v2(tmp_path / "cgroup/outer/inner", str(8 * GIB), GIB)
    assert left_by(probe, "this container", tmp_path) == [GIB + GIB // 2 + GIB // 4 - L1_MEMORY_MARGIN_BYTES]


def test_a_container_that_sees_only_its_own_cgroup(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, cgroup="0::/kubepods/not/visible/here\n")
    write_v2(tmp_path / "cgroup", str(2 * GIB), GIB)
    assert left_by(probe, "this container", tmp_path) == [GIB - L1_MEMORY_MARGIN_BYTES]
    with pytest.raises(ResourceError, match=r"memory limit of this container or cgroup leaves 0\.75 GiB"):
        refuse_if_short(GIB, tmp_path, probe, "L1")


def test_cgroup_version_1(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, cgroup="5:cpu:/x\n4:memory:/job\n0::/\n")
    job = tmp_path / "cgroup/memory/job"
    job.mkdir(parents=True)
    (job / "memory.limit_in_bytes").write_text(str(2 * GIB))
    (job / "memory.usage_in_bytes").write_text(str(GIB))
    (job / "memory.stat").write_text(f"total_inactive_file {GIB // 2}\ntotal_active_file 0\n")
    (job.parent / "memory.limit_in_bytes").write_text("9223372036854771712")
    assert left_by(probe, "this container", tmp_path) == [GIB + GIB // 2 - L1_MEMORY_MARGIN_BYTES]


def test_no_limit_is_no_bound(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, cgroup="0::/\n")
    write_v2(tmp_path / "cgroup", "max", 5)
    assert left_by(probe, "this container", tmp_path) == []


def test_a_kernel_that_tells_nothing_is_not_an_error(tmp_path: Path) -> None:
    assert [limit.source for limit in MemoryProbe(tmp_path / "none", tmp_path / "none").available_limits(tmp_path)] == [
        str(tmp_path)
    ]


def test_huge_pages_need_a_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("tmpfs /dev/shm tmpfs rw 0 0\n")
    with pytest.raises(ResourceError, match="needs a writable hugetlbfs"):
        find_hugepages(mounts, tmp_path)


def test_huge_pages_are_counted_in_their_pool(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"none {tmp_path} hugetlbfs rw,relatime,pagesize=2M 0 0\n")
    pool = tmp_path / "pools/hugepages-2048kB"
    pool.mkdir(parents=True)
    (pool / "free_hugepages").write_text("10\n")
    (pool / "resv_hugepages").write_text("3\n")
    huge = find_hugepages(mounts, tmp_path / "pools")
    assert (huge.directory, huge.page_bytes, huge.free_pages) == (tmp_path, 2 << 20, 7)
    huge.refuse_if_short(14 << 20)
    with pytest.raises(ResourceError, match=r"needs 8 huge pages of 2 MiB .*but 7 are free; reserve more"):
        huge.refuse_if_short((14 << 20) + 1)


def test_what_no_machine_of_this_size_can_give_is_refused_whoever_uses_it(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1024 kB\nMemAvailable: 1 kB\n")
    probe = MemoryProbe(proc=tmp_path, cgroup_root=tmp_path)
    refuse_if_impossible(1 << 20, Path("/dev/shm"), probe, "L1")
    with pytest.raises(ResourceError, match=r"has 0\.00 GiB in all; choose a smaller --l1-size-gb or add memory"):
        refuse_if_impossible((1 << 20) + 1, Path("/dev/shm"), probe, "L1")
