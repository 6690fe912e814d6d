from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pluggy
import pytest

from e2e.harness import Stack
from e2e.offline_runs import run_script


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small Llama with 8 KiB of KV a token."""
    pytest.importorskip("vllm")
    from lmcache.testing.tiny_models import make_llama

    return make_llama(tmp_path_factory.mktemp("models") / "llama")


_running: list[Stack] = []  # one at most
_LOG_END = 8000  # characters that the report of a failed test shows


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Generator[None, pluggy.Result[pytest.TestReport], None]:
    """A failed test shows the logs of its server and of its engine."""
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        for stack in _running:
            report.sections.append(("log of the server", stack.server.log()[-_LOG_END:]))
            report.sections.append(("log of the engine", stack.engine.log()[-_LOG_END:]))


@pytest.fixture(scope="session")
def computed(llama: Path) -> list[list[int]]:
    """What offline_script.py answers without a connector."""
    results, _ = run_script(llama, {}, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    return [tokens for tokens, _, _ in results["answers"]]


@pytest.fixture(scope="module")
def start_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Stack]]:
    """Starts a server and an engine; only one pair runs at a time."""

    def start(model: Path, **options: Any) -> Stack:
        close()
        stack = Stack(model, tmp_path_factory.mktemp("stack"), **options)
        _running.append(stack)
        return stack

    def close() -> None:
        while _running:
            _running.pop().close()

    yield start
    close()
