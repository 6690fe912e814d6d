"""Fails when a dependency of the package has no bounds, no reason in ARCHITECTURE.md, or a licence that is not known.

Runtime dependencies and extras, not what tests, lint, documents and packaging use, which is not shipped. Licences are
those of the installed packages; one that is not installed here is checked where it is. Known vulnerabilities need a
database from the network: audit_dependencies.py asks it.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FOR_DEVELOPERS = ("test", "lint", "docs", "dist")
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(.*)")
_LICENCES = re.compile(r"\b(MIT|BSD|Apache|MPL|Mozilla|PSF|ISC)\b", re.IGNORECASE)
_FORBIDDEN = re.compile(r"\b(AGPL|GPL|SSPL|BUSL|proprietary)\b", re.IGNORECASE)


def requirements(text: str) -> list[str]:
    """Returns the requirements of the package and its extras."""
    found = re.findall(r'"([^"]+)"', text.split("\ndependencies = [", 1)[1].split("\n]", 1)[0])
    section = text.split("[project.optional-dependencies]", 1)[1].split("\n[", 1)[0]
    for name, listed in re.findall(r"^([\w-]+) = \[(.*?)\]$", section, re.MULTILINE | re.DOTALL):
        if name not in _FOR_DEVELOPERS:
            found += re.findall(r'"([^"]+)"', listed)
    return found


def problems_of(requirement: str, table: str) -> list[str]:
    """Sentences."""
    match = _REQUIREMENT.fullmatch(requirement)
    assert match, requirement
    name, bounds = match.groups()
    found = []
    if not re.search(r">=|==|~=", bounds) or not re.search(r"<(?!=)|==|~=", bounds):
        found.append(f"{requirement} needs a lowest version and one that it stays below.")
    if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", table, re.IGNORECASE):
        found.append(f"{name} needs its reason in the table of dependencies in ARCHITECTURE.md.")
    try:
        licence = licence_of(name)
    except metadata.PackageNotFoundError:
        return found
    if not _LICENCES.search(licence) or _FORBIDDEN.search(licence):
        found.append(f"{name} has the licence {licence[:80]!r}, which is none of those that are known to fit.")
    return found


def licence_of(name: str) -> str:
    """What the installed package says of itself."""
    about = metadata.metadata(name)
    stated = [about[name] for name in ("License-Expression", "License") if name in about]
    stated += [value for value in about.get_all("Classifier") or [] if value.startswith("License ::")]
    return " ".join(stated).strip()


def main() -> int:
    table = (ROOT / "ARCHITECTURE.md").read_text().split("## Dependencies", 1)[1]
    found = [
        problem
        for requirement in requirements((ROOT / "pyproject.toml").read_text())
        for problem in problems_of(requirement, table)
    ]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
