"""What the program can print: every string of the sources but docstrings, with `…` for what is put in."""

from __future__ import annotations

import ast
import re
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src" / "lmcache"
_FORMAT = re.compile(r"%(?:\.\d+)?[sdrgfx]|%\.\d+[rgf]")


def sentences() -> set[str]:
    found: set[str] = set()
    for path in SOURCES.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.add("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(_FORMAT.sub("…", node.value))
    return found
