"""Copy threads run on the NUMA node of what they copy: on a made-up machine of two nodes with a GPU each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmcache.device.affinity import engine_cpus, near_cpus, unpinned
from unit.device.topology import make_topology

ALL = set(range(8))
FIRST, SECOND, ELSEWHERE = "0000:17:00.0", "0000:CA:00.0", "0000:01:00.0"


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    return make_topology(tmp_path, ["0-3", "4-5,6-7"], {FIRST: 0, SECOND: 1, ELSEWHERE: -1})


def test_a_gpus_copies_run_on_its_node(sysfs: Path) -> None:
    assert near_cpus(ALL, FIRST, sysfs) == {0, 1, 2, 3}
    assert near_cpus(ALL, SECOND, sysfs) == {4, 5, 6, 7}
    assert near_cpus({1, 2, 6}, SECOND, sysfs) == {6}


def test_what_is_not_known_or_not_allowed_changes_nothing(sysfs: Path) -> None:
    assert near_cpus(ALL, ELSEWHERE, sysfs) == ALL
    assert near_cpus(ALL, "0000:99:00.0", sysfs) == ALL
    assert near_cpus({1, 2}, SECOND, sysfs) == {1, 2}
    (sysfs / "devices/system/node/node1/cpulist").unlink()
    assert near_cpus(ALL, SECOND, sysfs) == ALL


def test_a_cpu_engines_copies_run_on_the_node_of_its_threads(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {5}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: own)
    assert near_cpus(ALL, sysfs=sysfs) == {4, 5, 6, 7}
    own = {3, 5}  # on both
    assert near_cpus(ALL, sysfs=sysfs) == ALL
    (sysfs / "devices/system/node/online").unlink()
    own = {5}
    assert near_cpus(ALL, sysfs=sysfs) == ALL


def test_threads_run_where_they_were_meant_to() -> None:
    before = os.sched_getaffinity(0)
    [first, *_] = sorted(engine_cpus())
    with unpinned({first}):
        assert os.sched_getaffinity(0) == {first}
    assert os.sched_getaffinity(0) == before
