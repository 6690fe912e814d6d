"""`make one T=...`: a word finds Python and C++ tests alike."""

from __future__ import annotations

import pytest

import one


@pytest.mark.parametrize(
    ("word", "python", "cpp"),
    [
        ("tests/unit/scripts", ["tests/unit/scripts"], ""),
        ("tests/unit/scripts/test_one.py::test_words", ["tests/unit/scripts/test_one.py::test_words"], ""),
        ("test_run_tests", ["tests/unit/scripts/test_run_tests.py"], ""),
        ("every_folder_of_tests_is", ["tests/unit/scripts/test_run_tests.py", "-k", "every_folder_of_tests_is"], ""),
        ("native/tests/arena_test.cc", [], "arena_test/"),
        ("arena_test/neighbours", [], "arena_test/neighbours"),
        ("no_test_is_called_so"[::-1], [], ""),
    ],
)
def test_words(word: str, python: list[str], cpp: str) -> None:
    assert (one.python_selection(word), one.cpp_selection(word)) == (python, cpp)


def test_a_word_without_tests_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert one.main(["no_test_is_called_so"[::-1]]) == 2
    assert one.main([]) == 2
    assert "No test has" in capsys.readouterr().err
