"""What every L2 adapter must do, as tests. Two lines in a test file run them on any adapter:

    from lmcache.testing.adapter_contract import adapter_contract
    TestMine = adapter_contract({"type": "plugin", "module_path": "mine", "class_name": "Mine"})

Every test works on an empty backend; the text "{folder}" in a specification stands for a folder that is new in each
test. Needs pytest; coroutines run by asyncio.run, no plugin is needed. LMCACHE_CONTRACT_SEED and LMCACHE_CONTRACT_STEPS
change the random part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("lmcache.testing.contract_model", "lmcache.testing.contract_rules")

from lmcache.l2.adapter import Adapter  # noqa: E402
from lmcache.l2.adapter_types import build, parse_adapter  # noqa: E402
from lmcache.testing.contract_model import ModelTest  # noqa: E402
from lmcache.testing.contract_rules import BufferRules, KeyRules, LifeRules, ObjectRules  # noqa: E402
from lmcache.testing.contract_run import AfterRestart, RecordingInventory  # noqa: E402

__all__ = ["AdapterContract", "RecordingInventory", "adapter_contract", "build_from"]


class AdapterContract(ObjectRules, KeyRules, BufferRules, LifeRules, ModelTest):
    """Derive from it and define `build` where two lines do not do: to prepare a backend, or to break it."""


def build_from(specification: Mapping[str, Any], folder: Path) -> Adapter:
    """The adapter of a specification as --l2-adapter takes it, with {folder} filled in."""

    def fill(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("{folder}", str(folder))
        return {name: fill(inner) for name, inner in value.items()} if isinstance(value, Mapping) else value

    return build(parse_adapter(fill(specification), 0)).adapter


def adapter_contract(
    adapter: Mapping[str, Any] | Callable[[Path], Adapter],
    *,
    after_restart: AfterRestart = "gone",
    keeps_prefix_order: bool = True,
    can_delete: bool = True,
    steps: int = 10_000,
) -> type[AdapterContract]:
    """A test class. `adapter`: a specification, or what builds an adapter in a folder. The rest is what it promises."""

    class Contract(AdapterContract):
        def build(self, folder: Path) -> Adapter:
            return adapter(folder) if callable(adapter) else build_from(adapter, folder)

    Contract.after_restart = after_restart
    Contract.keeps_prefix_order = keeps_prefix_order
    Contract.can_delete = can_delete
    Contract.steps = steps
    return Contract
