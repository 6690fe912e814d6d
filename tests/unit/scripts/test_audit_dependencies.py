"""Known vulnerabilities of what this package installs: what is made of the database's answer, and (slow) the answer."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from audit_dependencies import NOT_ASKED, audit, verdict

WELL: dict[str, Any] = {"name": "msgspec", "version": "0.20.0", "vulns": []}
VULNERABLE: dict[str, Any] = {
    "name": "pyyaml",
    "version": "5.3",
    "vulns": [{"id": "PYSEC-2021-142", "fix_versions": ["5.4"], "aliases": [], "description": "code"}],
}
UNKNOWN: dict[str, Any] = {"name": "here-alone", "skip_reason": "Dependency not found on PyPI"}


def test_a_known_vulnerability_is_a_line() -> None:
    code, lines = verdict({"dependencies": [WELL, VULNERABLE, UNKNOWN]})
    assert (code, lines) == (1, ["pyyaml 5.3: PYSEC-2021-142, mended in 5.4"])


def test_what_the_database_does_not_know_is_named() -> None:
    assert verdict({"dependencies": [WELL]}) == (0, ["1 packages, no known vulnerability."])
    code, lines = verdict({"dependencies": [WELL, UNKNOWN]})
    assert code == 0 and lines[1] == "Not in the database: here-alone."


def test_without_a_database_nothing_is_well() -> None:
    code, (line,) = verdict({"dependencies": [UNKNOWN]})
    assert code == NOT_ASKED and line.startswith("Nothing was audited")


@pytest.mark.slow
def test_nothing_that_is_installed_is_known_to_be_vulnerable() -> None:
    if importlib.util.find_spec("pip_audit") is None:
        pytest.skip("pip-audit is not installed")
    code, lines = audit()
    if code == NOT_ASKED:
        pytest.skip(lines[0])
    assert code == 0, lines
