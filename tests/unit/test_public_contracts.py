"""The public contracts say the same things in the same order, and their examples run."""

from __future__ import annotations

import doctest
import inspect
import os
from collections.abc import Iterator

import pytest

from lmcache.client import Client
from lmcache.integration.vllm.settings import ConnectorSettings
from lmcache.l1.store import L1Store
from lmcache.l2.adapter import Adapter
from lmcache.tiering.policies import PrefetchPolicy, StorePolicy
from process.support import server_within

CONTRACTS = (Client, L1Store, Adapter, StorePolicy, PrefetchPolicy, ConnectorSettings)
SECTIONS = ("Shapes and units: ", "Errors: ", "Example")
LONGEST_EXAMPLE_LINES = 20


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server_within(shm_name=f"lmcache-unit-contracts-{os.getpid()}", chunk_size=256) as server:
        yield server.status()["rpc_endpoint"]


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
def test_a_contract_has_all_sections_and_its_example_runs(contract: type, url: str) -> None:
    docstring = inspect.getdoc(contract) or ""
    places = [docstring.find(f"\n\n{section}") for section in SECTIONS]
    assert -1 not in places and places == sorted(places)
    surroundings = {"url": url, "name": f"lmcache-unit-example-{os.getpid()}"}  # several runs may share the machine
    example = doctest.DocTestParser().get_doctest(docstring, surroundings, contract.__name__, None, None)
    assert 1 <= sum(statement.source.count("\n") for statement in example.examples) <= LONGEST_EXAMPLE_LINES
    said: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert results.attempted and not results.failed, "".join(said)
