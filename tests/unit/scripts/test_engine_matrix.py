"""What the results of a run become."""

from __future__ import annotations

from pathlib import Path

from engine_matrix import (
    FILE,
    README,
    REFERENCE,
    TURNS,
    hit_ratio,
    parts_of_engine,
    time_in_turns,
    whole_engine,
    with_medians,
)
from lmcache.cli.tested_engines import EngineResult, known_engines

CASES = """<testsuites><testsuite>
<testcase classname="e2e.test_engine_matrix" name="test_cold">
  <properties><property name="tokens" value="t"/><property name="kv" value="k"/></properties></testcase>
<testcase classname="e2e.test_engine_matrix" name="test_l1_hit">
  <properties><property name="hit_ms" value="41.5"/><property name="computed_ms" value="2000.0"/></properties>
  <failure/></testcase>
<testcase classname="e2e.test_engine_matrix" name="test_abort"><error/></testcase>
</testsuite></testsuites>"""
PARTS = """<testsuites><testsuite>
<testcase classname="tests.simulation.test_connector" name="test_a"/>
<testcase classname="tests.simulation.test_connector" name="test_b"><failure/></testcase>
<testcase classname="tests.simulation.test_connector" name="test_c"/>
<testcase classname="tests.unit.integration.vllm.test_connector" name="test_d"/>
</testsuite></testsuites>"""


def test_a_whole_engine_has_a_result_for_each_scenario(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(CASES)
    found = whole_engine(EngineResult("1", True), report)
    assert found.scenarios == {"cold": "passed", "l1 hit": "failed", "abort": "failed"}
    assert (found.tokens, found.kv, found.passed) == ("t", "k", False)
    assert (found.hit_ms, found.computed_ms) == (41.5, 2000.0)


def test_parts_of_an_engine_fail_as_soon_as_a_test_of_them_does(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(PARTS)
    assert parts_of_engine(EngineResult("1", False), report).scenarios == {
        "both sides of the connector in its scheduler": "failed",
        "connector interface": "passed",
    }


def test_hits_of_a_version_are_compared_with_the_references_in_turns() -> None:
    """On a machine that is three times as slow in the second turn."""
    asked: list[str] = []
    times = iter([44.0, 40.0, 132.0, 120.0, 60.0, 40.0])

    def time(version: str) -> EngineResult:
        asked.append(version)
        return EngineResult(version, True, hit_ms=next(times), computed_ms=1000.0)

    turns = time_in_turns("0.30.0", time)
    assert asked == ["0.30.0", REFERENCE] * TURNS
    assert hit_ratio(turns) == 1.1
    failed = time_in_turns("0.30.0", lambda version: EngineResult(version, True, hit_ms=40.0 * (version != REFERENCE)))
    assert hit_ratio(failed) == 0.0
    found = with_medians(EngineResult("0.30.0", True), [own for own, _ in turns])
    assert (found.hit_ms, found.computed_ms) == (60.0, 1000.0)


def test_results_are_kept_in_this_tree_whichever_package_is_imported() -> None:
    assert README.parent / "src" / "lmcache" / "cli" / "tested_engines.json" == FILE
    assert {engine.version for engine in known_engines(FILE)} >= {REFERENCE}
