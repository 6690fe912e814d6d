"""Fails when a source file has grown past the limit. A file has one subject; one that needs more room has two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_LINES = 600


def main() -> int:
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True).stdout
    too_long = []
    for name in tracked.splitlines():
        if not name.endswith((".py", ".pyi", ".cc", ".h")) or not (ROOT / name).exists():
            continue
        lines = len((ROOT / name).read_text().splitlines())
        if lines > LIMIT_LINES:
            too_long.append(f"{name}: {lines} lines, at most {LIMIT_LINES}")
    print("\n".join(too_long))
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
