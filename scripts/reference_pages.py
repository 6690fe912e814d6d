"""What the writers of docs/reference share: tables of keys, and writing pages or checking that they are current."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "reference"


def key_table(rows: Iterable[Sequence[str]]) -> str:
    """Makes a table of rows (key in backticks, what it must be, default, meaning)."""
    lines = ["| key | must be | default | meaning |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |" for cells in rows]
    return "\n".join(lines) + "\n"


def write_or_check(pages: Mapping[str, str]) -> int:
    """Writes the pages of these names; with --check it only says which are not current. The exit code."""
    is_current = True
    for name, text in pages.items():
        path = FOLDER / name
        if "--check" not in sys.argv[1:]:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"{path} is not current: run scripts/{Path(sys.argv[0]).name}", file=sys.stderr)
            is_current = False
    return 0 if is_current else 1
