"""What is said of a version of vLLM is what `make matrix` found, here, in the README and by `lmcache doctor`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_matrix import README, RUN_ON_CPU, SOURCES_ONLY, readme_with_table
from install_cpu_engine import VLLM_VERSION
from lmcache.cli import doctor_checks
from lmcache.cli.tested_engines import EngineResult, judge, known_engines, markdown_table

ENGINES = (
    EngineResult("0.30.0", True, {"cold": "passed", "l1 hit": "passed"}),
    EngineResult("0.31.0", True, {"cold": "passed", "l1 hit": "failed"}),
    EngineResult("0.33.0", False, {"connector interface": "passed"}),
)


def test_the_readme_has_the_table_of_the_file() -> None:
    assert README.read_text() == readme_with_table(), "run scripts/engine_matrix.py --readme"


def test_the_file_says_what_the_matrix_runs() -> None:
    found = {engine.version: engine for engine in known_engines()}
    wanted = {*RUN_ON_CPU, *SOURCES_ONLY}
    assert set(found) == wanted, "run make matrix for those that are missing"
    assert all(version in README.read_text() for version in wanted)
    assert {version for version, engine in found.items() if engine.runs} == set(RUN_ON_CPU) & set(found)
    assert found[VLLM_VERSION].passed


def test_every_version_that_ran_gave_the_same_tokens_and_the_same_kv() -> None:
    ran = [engine for engine in known_engines() if engine.runs]
    assert len(ran) > 1 and all(engine.tokens and engine.kv for engine in ran)
    assert len({(engine.tokens, engine.kv) for engine in ran}) == 1


def test_no_version_is_slow_for_a_reason_that_nobody_knows() -> None:
    assert not [engine.version for engine in known_engines() if engine.is_slow]
    slow = EngineResult("0.30.0", True, {"cold": "passed"}, hit_ms=50.0, computed_ms=2000.0, hit_ratio=1.2)
    assert slow.is_slow
    explained = replace(slow, explained="copies wait for a step")
    assert not explained.is_slow
    assert markdown_table((explained,)).endswith(
        "| 50 / 2000 ms; in turns 1.20 times the reference's (copies wait for a step) |"
    )


@pytest.mark.parametrize(
    ("version", "is_known", "finding"),
    [
        ("0.30.0", True, "tested as a whole engine on CPU"),
        ("0.30.0+cpu", True, "tested as a whole engine on CPU"),
        ("0.30.1", False, "not tested; 0.30.0 are"),
        ("0.31.0", False, "tested, and l1 hit failed; 0.30.0 passed everything"),
        ("0.33.0", True, "tested by its own scheduler and connector interface, not as a whole engine"),
    ],
)
def test_what_is_known_of_a_version(version: str, is_known: bool, finding: str) -> None:
    assert judge(version, ENGINES) == (is_known, finding)


def test_doctor_says_whether_the_engine_that_it_finds_was_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict_of(version: str) -> doctor_checks.Verdict:
        monkeypatch.setattr("importlib.metadata.version", lambda name: version)
        (verdict,) = doctor_checks.engine(False)
        return verdict

    tested = verdict_of(f"{VLLM_VERSION}+cpu")
    assert (tested.level, tested.remedy) == (doctor_checks.OK, "")
    assert tested.found == f"{VLLM_VERSION}+cpu: tested as a whole engine on CPU"
    other = verdict_of("0.99.0")
    assert other.level == doctor_checks.NOTE
    assert "0.99.0: not tested" in other.found
    assert VLLM_VERSION in other.found


def test_a_scenario_that_failed_stands_out_in_the_table() -> None:
    table = markdown_table(ENGINES).splitlines()
    assert table[2:4] == [
        "| 0.30.0 | engine on CPU | cold, l1 hit |",
        "| 0.31.0 | engine on CPU | cold, l1 hit: **failed** |",
    ]


def test_the_table_has_times_where_they_were_measured() -> None:
    timed = EngineResult("0.32.0", True, {"cold": "passed"}, hit_ms=41.4, computed_ms=1999.6)
    lines = markdown_table((ENGINES[0], timed)).splitlines()
    assert {line.count("|") for line in lines} == {5}
    assert lines[2] == "| 0.30.0 | engine on CPU | cold, l1 hit |  |"
    assert lines[3] == "| 0.32.0 | engine on CPU | cold | 41 / 2000 ms |"
