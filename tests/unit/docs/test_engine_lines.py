"""Each `vllm serve ...` line of the documents names a connector of this package, and options that it takes."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import shlex

import pytest

from lmcache.integration.vllm.settings import ConnectorSettings
from unit.docs.test_command_lines import PAGES, ROOT, whole_lines

BEGINNING = re.compile("vllm serve ")
OPTION = "--kv-transfer-config"
KEYS = {"kv_connector", "kv_role", "kv_connector_extra_config", "kv_connector_module_path"}
ROLES = {"kv_both", "kv_producer", "kv_consumer"}
OF_A_MODULE = {"LMCacheConnectorV1Dynamic"}  # vLLM finds the others by name


LINES = [(str(page.relative_to(ROOT)), line) for page in PAGES for line in whole_lines(page.read_text(), BEGINNING)]


def test_there_are_lines() -> None:
    assert len(LINES) >= 9


@pytest.mark.parametrize(("page", "line"), LINES)
def test_the_connector_takes_it(page: str, line: str, caplog: pytest.LogCaptureFixture) -> None:
    words = shlex.split(line)
    transfer = json.loads(words[words.index(OPTION) + 1])
    assert set(transfer) <= KEYS and transfer["kv_role"] in ROLES, page
    module = transfer.get("kv_connector_module_path")
    assert (transfer["kv_connector"] in OF_A_MODULE) is (module is not None), page
    if module is not None:
        assert importlib.util.find_spec(module) is not None, page
        return
    assert transfer["kv_connector"] == "LMCacheMPConnector", page
    with caplog.at_level(logging.WARNING):
        ConnectorSettings.read(transfer.get("kv_connector_extra_config", {}))
    assert not caplog.records, "a key that it does not know, or that has no effect"
