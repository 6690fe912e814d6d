"""Prints the requirements of the named extras of pyproject.toml, one a line, without installing the package itself."""

from __future__ import annotations

import re
import sys
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def extras(names: list[str]) -> list[str]:
    text = PYPROJECT.read_text()
    section = text.split("[project.optional-dependencies]", 1)[1].split("\n[", 1)[0]
    requirements: list[str] = []
    for name in names:
        match = re.search(rf"^{re.escape(name)} = \[(.*?)\]$", section, re.MULTILINE | re.DOTALL)
        if match is None:
            sys.exit(f"pyproject.toml has no extra named {name!r}")
        requirements += re.findall(r'"([^"]+)"', match.group(1))
    return requirements


if __name__ == "__main__":
    print("\n".join(requirement.replace(" ", "") for requirement in extras(sys.argv[1:])))
