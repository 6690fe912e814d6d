"""The page of metrics says what the sources declare."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_of_metrics_is_current() -> None:
    script = ROOT / "scripts" / "write_metrics_reference.py"
    done = subprocess.run([sys.executable, str(script), "--check"], check=False)
    assert done.returncode == 0, "run scripts/write_metrics_reference.py"
