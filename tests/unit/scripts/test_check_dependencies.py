"""The check of dependencies finds what is not bounded, not explained or not licensed."""

from __future__ import annotations

import pytest

import check_dependencies

TABLE = "| pyyaml | server | files |\n| msgspec | both | messages |"


@pytest.mark.parametrize(
    ("requirement", "said"),
    [
        ("pyyaml", "needs a lowest version"),
        ("pyyaml>=6", "needs a lowest version"),
        ("pyyaml<7", "needs a lowest version"),
        ("pyzmq>=25,<28", "needs its reason"),
        ("yaml>=1,<2", "needs its reason"),
    ],
)
def test_what_is_wrong_is_said(requirement: str, said: str) -> None:
    assert any(said in problem for problem in check_dependencies.problems_of(requirement, TABLE))


def test_licences_that_do_not_fit_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for licence, fits in (("MIT", True), ("GNU AGPL v3", False), ("", False), ("MIT OR GPL-2.0", False)):
        monkeypatch.setattr(check_dependencies, "licence_of", lambda name, licence=licence: licence)
        assert (check_dependencies.problems_of("pyyaml>=6,<7", TABLE) == []) is fits


def test_every_dependency_of_this_package_is_in_order() -> None:
    assert check_dependencies.main() == 0
