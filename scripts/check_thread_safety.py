"""Checks the native mutexes with clang's thread-safety analysis, by clang-tidy: every source that includes mutex.h."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INCLUDES = ("native/include", "native/src")
ANNOTATED = "lmcache/mutex.h"
TIDY = Path(sys.executable).parent / "clang-tidy"
CHECKS = "-*,clang-diagnostic-thread-safety*,bugprone-use-after-move"


def includes_of(path: Path, seen: set[Path]) -> set[Path]:
    """The project's own headers that a source sees, at any depth."""
    for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE):
        for folder in (path.parent, *(ROOT / include for include in INCLUDES)):
            header = (folder / name).resolve()
            if header.exists() and header not in seen:
                seen.add(header)
                includes_of(header, seen)
    return seen


def check(source: Path) -> str:
    """What is wrong, "" for nothing."""
    options = ["-std=c++20", "-Wthread-safety", *(f"-I{include}" for include in INCLUDES)]
    command = [str(TIDY), f"--checks={CHECKS}", "--warnings-as-errors=*", "--quiet", str(source), "--", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout + done.stderr if done.returncode else ""


def main() -> int:
    annotated = (ROOT / INCLUDES[0] / ANNOTATED).resolve()
    sources = [path for path in sorted((ROOT / "native/src").rglob("*.cc")) if annotated in includes_of(path, set())]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        faults = [fault for fault in threads.map(check, sources) if fault]
    print("\n".join(faults), end="")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
