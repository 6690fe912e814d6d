"""`make dist`: the source archive, and a wheel of this Python that an empty environment installs and runs."""

from __future__ import annotations

import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 1800.0
# What scripts/make_dist.py does, into another folder than that of a release.
PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {scripts!r})
import make_dist
make_dist.DIST = Path({dist!r})
sys.exit(make_dist.main([sys.executable]))
"""
DATA = ("_native.pyi", "py.typed", "admin/dashboard/dashboard.html", "cli/tested_engines.json")


@pytest.mark.slow
def test_what_is_published_is_built_and_runs(tmp_path: Path) -> None:
    """With tools in an environment of their own, which the package index gives."""
    python, dist = tmp_path / "tools" / "bin" / "python", tmp_path / "dist"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "tools")], check=True)
    listing = [sys.executable, str(ROOT / "scripts" / "list_extras.py"), "dist"]
    tools = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split()
    if subprocess.run([str(python), "-m", "pip", "install", "--quiet", *tools], capture_output=True).returncode:
        pytest.skip("the package index does not give the tools")
    program = PROGRAM.format(scripts=str(ROOT / "scripts"), dist=str(dist))
    done = subprocess.run([str(python), "-c", program], capture_output=True, text=True, timeout=SECONDS)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    archive, wheel = sorted(dist.iterdir(), key=lambda path: path.suffix)
    assert wheel.name.endswith(f"-manylinux_2_34_{platform.machine()}.whl")
    with tarfile.open(archive) as sources, zipfile.ZipFile(wheel) as built:
        held = {name.partition("/")[2] for name in sources.getnames()}
        assert {"pyproject.toml", "CMakeLists.txt", "src/lmcache/server.py"} <= held
        assert not [name for name in held if name.endswith(".so")]
        assert {f"lmcache/{name}" for name in DATA} <= set(built.namelist())
