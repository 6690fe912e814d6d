"""Asks the index's database whether what this package installs today has known vulnerabilities, extras included.

Codes: 0 when nothing is known, 1 with a line for each vulnerability, 3 where the database cannot be asked. What the
database does not know is named, and is no success of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from check_dependencies import ROOT, requirements

NOT_ASKED = 3
_SECONDS = 900.0


def verdict(report: Mapping[str, Any]) -> tuple[int, list[str]]:
    """`report`: of pip-audit, as JSON. A code and lines."""
    packages = report["dependencies"]
    known = [package for package in packages if "skip_reason" not in package]
    unknown = sorted(package["name"] for package in packages if "skip_reason" in package)
    lines = [
        f"{package['name']} {package['version']}: {fault['id']}, mended in {', '.join(fault['fix_versions']) or 'none'}"
        for package in known
        for fault in package["vulns"]
    ]
    if lines:
        return 1, lines
    if not known:
        return NOT_ASKED, ["Nothing was audited: no database of vulnerabilities answers here."]
    told = [f"{len(known)} packages, no known vulnerability."]
    return 0, told + [f"Not in the database: {', '.join(unknown)}."] * bool(unknown)


def audit() -> tuple[int, list[str]]:
    with tempfile.TemporaryDirectory(prefix="lmcache-audit-") as folder:
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text("\n".join(requirements((ROOT / "pyproject.toml").read_text())))
        command = [sys.executable, "-m", "pip_audit", "--requirement", str(wanted), "--format", "json"]
        done = subprocess.run(
            [*command, "--progress-spinner", "off"], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    try:
        return verdict(json.loads(done.stdout))
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return NOT_ASKED, [f"Nothing was audited: {last}"]


def main() -> int:
    code, lines = audit()
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
