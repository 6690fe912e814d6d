"""All that is wrong is one error, whose kind decides the exit code."""

from __future__ import annotations

import pytest

from lmcache.core.problems import Problems
from lmcache.errors import ConfigError, ResourceError


def test_nothing_wrong_raises_nothing() -> None:
    problems = Problems()
    with problems.collect():
        pass
    problems.raise_all()


def test_refusals_are_collected_in_order_and_once() -> None:
    problems = Problems()
    for fault in (ResourceError("a."), ResourceError("b.", "c."), ResourceError("a.")):
        with problems.collect():
            raise fault
    with pytest.raises(ResourceError) as caught:
        problems.raise_all()
    assert caught.value.problems == ("a.", "b.", "c.")
    problems.add("d.")
    with pytest.raises(ConfigError) as wrong_usage:
        problems.raise_all()
    assert wrong_usage.value.problems == ("a.", "b.", "c.", "d.")
    assert str(wrong_usage.value) == "a.\nb.\nc.\nd."


def test_other_faults_pass() -> None:
    with pytest.raises(ValueError), Problems().collect():
        raise ValueError
