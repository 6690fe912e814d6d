"""Fails when a source file has grown past the limit. A file has one subject; one that needs more room has two.

A layer adds one behaviour to an adapter, hence the lower limit of their folder.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_LINES = 600
LIMIT_LINES_OF_FOLDERS = {"src/lmcache/l2/layers": 120}


def main() -> int:
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True).stdout
    too_long = []
    for name in tracked.splitlines():
        if not name.endswith((".py", ".pyi", ".cc", ".h")) or not (ROOT / name).exists():
            continue
        limit = LIMIT_LINES_OF_FOLDERS.get(str(Path(name).parent), LIMIT_LINES)
        lines = len((ROOT / name).read_text().splitlines())
        if lines > limit:
            too_long.append(f"{name}: {lines} lines, at most {limit}")
    print("\n".join(too_long))
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
