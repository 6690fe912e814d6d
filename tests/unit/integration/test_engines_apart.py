"""What is for one engine imports nothing of another, and nothing of an engine comes with the package itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lmcache

FOLDER = Path(lmcache.__file__).parent / "integration"
ENGINES = ("vllm", "sglang", "tensorrt_llm")


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("folder", ["engine", *ENGINES])
def test_the_parts_of_one_engine_import_no_other(folder: str) -> None:
    files = sorted((FOLDER / folder).rglob("*.py"))
    assert len(files) > 3
    for path in files:
        for engine in ENGINES:
            if engine != folder:
                foreign = {
                    name for name in imported(path) if name.startswith((engine, f"lmcache.integration.{engine}"))
                }
                assert not foreign, path


def test_the_package_imports_no_engine() -> None:
    code = "import sys, lmcache.client; print([name for name in ('vllm', 'sglang', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
