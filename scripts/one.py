"""Runs the tests that a word selects: a file or folder, `file.py::test_name`, or a part of a test's or file's name.

Python tests run on the sources of this tree; C++ tests are built without a sanitizer.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPP_TESTS = "native/tests"
CPP_BUILD = "build/test-plain"


def python_selection(word: str) -> list[str]:
    """Arguments of pytest; empty if the word selects no Python test."""
    path = word.partition("::")[0]
    if (ROOT / path).exists():
        return [] if path.startswith("native") else [word]
    by_name = re.compile(rf"^\s*(?:async )?def test_\w*{re.escape(word)}|^class Test\w*{re.escape(word)}", re.MULTILINE)
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    of_file = [str(file.relative_to(ROOT)) for file in files if word in file.stem]
    if of_file:
        return of_file
    found = [str(file.relative_to(ROOT)) for file in files if by_name.search(file.read_text())]
    return [*found, "-k", word] if found else []


def cpp_selection(word: str) -> str:
    """A part of the names of C++ tests, which are `file/test`; empty if the word selects none."""
    path = ROOT / word
    if path.exists():
        return f"{path.stem}/" if path.suffix == ".cc" else ""
    for file in sorted((ROOT / CPP_TESTS).glob("*_test.cc")):
        names = re.findall(r"^TEST_CASE\((\w+)\)", file.read_text(), re.MULTILINE)
        if any(word in f"{file.stem}/{name}" for name in names):
            return word
    return ""


def commands(word: str) -> list[list[str]]:
    """What has to run, in order."""
    found = []
    if selected := cpp_selection(word):
        options = ["-DLMCACHE_BUILD_BINDINGS=OFF", "-DLMCACHE_BUILD_TESTS=ON"]
        found.append(["cmake", "-S", ".", "-B", CPP_BUILD, "-G", "Ninja", *options])
        found.append(["cmake", "--build", CPP_BUILD])
        found.append([f"{CPP_BUILD}/lmcache_tests", selected])
    if arguments := python_selection(word):
        found.append(["make", "--no-print-directory", "native"])
        found.append([sys.executable, "-m", "pytest", *arguments])
    return found


def main(words: Sequence[str]) -> int:
    if len(words) != 1 or not words[0]:
        print("One word or path selects the tests: make one T=a_full_disk.", file=sys.stderr)
        return 2
    selected = commands(words[0])
    if not selected:
        print(f"No test has {words[0]!r} in its name, and there is no such path.", file=sys.stderr)
        return 2
    for command in selected:
        print("$", *command, flush=True)
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
