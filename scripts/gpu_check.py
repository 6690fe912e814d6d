"""Everything that this project can prove on an NVIDIA GPU without an engine, in one call and one table.

    python scripts/gpu_check.py wheels FOLDER          # with a package index: what a machine without one needs
    python scripts/gpu_check.py run --wheels FOLDER    # on the GPU's machine: installs that and this package, checks
    python scripts/gpu_check.py run                    # where the package and its tests' requirements are installed

Python 3.12 on Linux x86-64 unless --python says otherwise, with torch, CMake and a compiler of its own. Codes: 0 when
all is well, 1 when something is not, 3 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NO_GPU = 3
WHEELS = (
    *("nanobind>=2.4,<3", "scikit-build-core>=0.10,<1", "pathspec", "packaging", "pyzmq>=25,<28", "msgspec>=0.18,<1"),
    *("starlette>=0.40,<2", "uvicorn>=0.30,<1", "h11", "anyio>=4", "idna", "typing-extensions>=4.6", "click"),
    *("prometheus-client>=0.18,<1", "pyyaml>=6,<7", "cbor2>=5.6,<7", "pytest>=8,<10", "pluggy", "iniconfig"),
    *("pygments", "hypothesis>=6,<7", "sortedcontainers"),
)
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_SANITIZED = "tests/gpu/test_copies.py"
_SANITIZED_SHAPES = "round or heads_first or latent or cut_for_kernels"
_STREAM_SECONDS = 5.0
_STREAM_LIMIT = 1.03  # how many times as long a decoding step may take beside copies


@dataclass(frozen=True)
class Row:
    """A line of the table. `ok` None: only told."""

    name: str
    value: str
    ok: bool | None = None


def why_no_gpu() -> str:
    """A sentence, "" where there is a GPU. Asks the driver, because nothing is installed yet."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "There is no NVIDIA driver (libcuda.so.1) on this machine, so nothing was checked."
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "The NVIDIA driver of this machine finds no GPU, so nothing was checked."
    return ""


def download(folder: Path, python: str) -> None:
    platforms = [option for name in _PLATFORMS for option in ("--platform", name)]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
            *("--python-version", python, "--implementation", "cp", *platforms, "--dest", str(folder), *WHEELS),
        ],
        check=True,
    )
    size_bytes = sum(path.stat().st_size for path in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels, {size_bytes / 1e6:.1f} MB, in {folder}")


def install(wheels: Path, site: Path, environment: dict[str, str]) -> None:
    """The wheels, then this package built with them, into `site`."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site)]
    subprocess.run([*pip, *map(str, sorted(wheels.glob("*.whl")))], check=True, env=environment)
    subprocess.run([*pip, "--no-build-isolation", str(ROOT)], check=True, env=environment)


# ---- checks ----------------------------------------------------------------------------------------------------------
class Checks:
    def __init__(self, device: str, shape: str, environment: dict[str, str]) -> None:
        self.device, self._shape, self._environment = device, shape, environment
        self.rows: list[Row] = []

    def run(self, name: str, check: Callable[[], Iterator[Row]]) -> None:
        """A check that breaks is a row, and the others go on."""
        began = time.monotonic()
        try:
            self.rows += check()
        except Exception as error:  # the root of a check
            self.rows.append(Row(name, f"{type(error).__name__}: {error}", ok=False))
        self.rows.append(Row(f"({name})", f"{time.monotonic() - began:.0f} s"))
        for row in self.rows[-2:]:
            print(line(row), flush=True)

    def _command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(arguments, cwd=ROOT, env=self._environment, capture_output=True, text=True, check=False)

    def tests(self, name: str, *arguments: str, under: Sequence[str] = ()) -> Iterator[Row]:
        done = self._command(*under, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments)
        yield suite_row(name, done.returncode, done.stdout + done.stderr)

    def speeds(self) -> Iterator[Row]:
        done = self._command(sys.executable, "benchmarks/gpu.py", "--copies-only", "--json")
        yield from speed_rows(json.loads(done.stdout))

    def stream(self) -> Iterator[Row]:
        from lmcache.testing.processes import CacheServer
        from process.paged_engine import SHAPES, engine_process

        chunks = SHAPES[self._shape].chunks // 2
        size_gb = 4.0 if self._shape != "small" else 0.0625
        with tempfile.TemporaryDirectory() as folder, CacheServer(Path(folder), l1_size_gb=size_gb) as server:
            server.wait_ready()
            try:
                with engine_process(server.port, "stream", self.device, self._shape) as engine:
                    steps = engine.ask("steps", prompt=1, chunks=chunks, seconds=_STREAM_SECONDS)
                    yield from stream_rows(steps, _STREAM_LIMIT if self.device == "cuda" else None)
            finally:
                (Path("/dev/shm") / server.shm_name).unlink(missing_ok=True)

    def sanitizer(self) -> Iterator[Row]:
        tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        if not Path(tool).exists():
            said = "not installed: install the CUDA toolkit, or leave the check out with --no-sanitizer"
            yield Row("copies under compute-sanitizer", said, ok=False)
            return
        under = (tool, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all")
        yield from self.tests("copies under compute-sanitizer", _SANITIZED, "-k", _SANITIZED_SHAPES, under=under)


def suite_row(name: str, code: int, output: str) -> Row:
    """`output` of pytest: its last line, and why when something failed. Nothing run is no success."""
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", output)
    said = ", ".join(f"{count} {outcome}" for count, outcome in counts) or "no test ran"
    ok = code == 0 and any(outcome == "passed" for _, outcome in counts)
    return Row(name, said if ok else f"{said}; code {code}\n{output[-1500:]}", ok=ok)


def speed_rows(results: Sequence[dict[str, Any]]) -> Iterator[Row]:
    for result in results:
        value = f"{result['value']:.3g} {result['unit']}  {result['target']}  {result['detail']}".strip()
        yield Row(result["name"], value, ok=result["ok"] if result["target"] else None)


def stream_rows(steps: dict[str, float], limit: float | None) -> Iterator[Row]:
    """`limit`: of a step's time beside copies to its time alone; None, where a device's copies take the step's own
    processor, so that the ratio is only told."""
    yield Row("a decoding step alone", f"{steps['alone']:.3f} ms")
    for work, moved in (("storing", "stored"), ("loading", "loaded")):
        ratio = steps[work] / steps["alone"]
        value = f"{steps[work]:.3f} ms, {ratio:.2f} times, {steps[moved]:.0f} chunks {moved}"
        value += f"  at most {limit}" if limit is not None else ""
        yield Row(f"a decoding step while {work}", value, ok=steps[moved] > 0 and (limit is None or ratio <= limit))


def line(row: Row) -> str:
    verdict = {True: "ok", False: "FAIL", None: ""}[row.ok]
    return f"{verdict:<5}{row.name:<62} {row.value}"


# ---- the command -----------------------------------------------------------------------------------------------------
def check_all(device: str, shape: str, environment: dict[str, str], *, sanitizer: bool) -> int:
    checks = Checks(device, shape, environment)
    on_gpu = device == "cuda"
    if on_gpu:
        checks.run("copies", lambda: checks.tests("copies right, every layout and way", "tests/gpu"))
        checks.run("speed", checks.speeds)
    checks.run(
        "engine",
        lambda: checks.tests(
            "store, evict, stream, abort, kill -9", "tests/process/test_paged_engine.py", "-k", device
        ),
    )
    checks.run("stream", checks.stream)
    if on_gpu and sanitizer:
        checks.run("sanitizer", checks.sanitizer)
    print("\n" + "\n".join(line(row) for row in checks.rows), flush=True)
    failed = sum(row.ok is False for row in checks.rows)
    print(f"{sum(row.ok is True for row in checks.rows)} passed, {failed} failed")
    return 1 if failed else 0


def run(arguments: argparse.Namespace) -> int:
    missing = why_no_gpu() if arguments.device == "cuda" else ""
    if missing:
        print(missing, file=sys.stderr)
        return NO_GPU
    with contextlib.ExitStack() as stack:
        paths = [str(ROOT / "tests"), str(ROOT / "benchmarks")]
        if arguments.wheels is not None:
            paths.insert(0, stack.enter_context(tempfile.TemporaryDirectory(prefix="lmcache-gpu-")))
        inherited = os.environ.get("PYTHONPATH", "")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*paths, inherited]))}
        if arguments.wheels is not None:
            began = time.monotonic()
            install(arguments.wheels, Path(paths[0]), environment)
            print(f"installed in {time.monotonic() - began:.0f} s", flush=True)
        sys.path[:0] = paths
        os.environ["PYTHONPATH"] = environment["PYTHONPATH"]  # for the processes that the checks start
        return check_all(arguments.device, arguments.shape, environment, sanitizer=not arguments.no_sanitizer)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    wheels = commands.add_parser("wheels", help="download what a machine without an index needs")
    wheels.add_argument("folder", type=Path)
    wheels.add_argument("--python", default="3.12", help="of the GPU's machine")
    checking = commands.add_parser("run", help="check")
    checking.add_argument(
        "--wheels", type=Path, help="install these and this package first, apart from everything else"
    )
    checking.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: what can be rehearsed on one")
    checking.add_argument("--shape", choices=("8b", "small"), default="8b", help="of the KV beside the running stream")
    checking.add_argument("--no-sanitizer", action="store_true", help="where compute-sanitizer cannot be had")
    arguments = parser.parse_args()
    if arguments.command == "wheels":
        arguments.folder.mkdir(parents=True, exist_ok=True)
        download(arguments.folder, arguments.python)
        return 0
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
