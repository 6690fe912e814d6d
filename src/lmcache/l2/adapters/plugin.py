"""`plugin`: an adapter that somebody else wrote against the contract (docs/how-to/write-an-adapter.md).

It gets what every adapter gets from the runner. What it returns is checked for its shape, so that a mistake is a fault
of that adapter and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError, ConfigError, LMCacheError, ResourceError
from lmcache.l2.adapter import Adapter, Capacity, Inventory
from lmcache.l2.adapters import outside
from lmcache.l2.config import AdapterConfig
from lmcache.l2.keys import Key, mapping, text, text_or_empty

T = TypeVar("T")

KEYS = (
    Key("module_path", text),
    Key("class_name", text),
    Key("adapter_params", mapping, {}),
    Key("config_class_name", text_or_empty, ""),
)

GUIDE = "docs/how-to/write-an-adapter.md"
METHODS = ("open", "store", "load", "probe", "delete", "clear", "close")


class PluginAdapter:
    def __init__(self, inner: Adapter, config: AdapterConfig) -> None:
        self.inner = inner
        self._name = config.name
        self._where = config.where

    @property
    def capacity(self) -> Capacity:
        return getattr(self.inner, "capacity", Capacity())

    def overhead_bytes(self) -> int:
        overhead_bytes = getattr(self.inner, "overhead_bytes", None)
        return overhead_bytes() if overhead_bytes else 0

    def status(self) -> dict[str, int]:
        status = getattr(self.inner, "status", None)
        return dict(status()) if status else {}

    async def open(self, inventory: Inventory) -> None:
        try:
            await self.inner.open(inventory)
        except LMCacheError as error:
            if isinstance(error, ConfigError | ResourceError):
                raise
            raise ResourceError(f"{self._where}: {error}") from error
        except Exception as error:  # code from outside may raise anything
            raise ResourceError(f"{self._where}: open() raised {type(error).__name__}: {error}") from error

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        return self._checked("store", await self.inner.store(keys, buffers), len(keys), StoreOutcome)

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        return self._checked("load", await self.inner.load(keys, buffers), len(keys), LoadOutcome)

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        sizes = self._checked("probe", await self.inner.probe(keys), len(keys), int, type(None))
        for size in sizes:
            if size is not None and (isinstance(size, bool) or size < 0):  # True would be an object of one byte
                raise AdapterError(f"{self._name}: probe() must return bytes or None for each key, got {size!r}")
        return sizes

    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        return self._checked("delete", await self.inner.delete(keys, corrupt=corrupt), len(keys), bool)

    async def clear(self) -> tuple[int, int]:
        cleared = self._checked("clear", await self.inner.clear(), 2, int)
        return cleared[0], cleared[1]

    async def close(self) -> None:
        await self.inner.close()

    def _checked(self, method: str, results: Any, count: int, *kinds: type) -> list[Any]:
        good = isinstance(results, list | tuple) and len(results) == count
        if not good or not all(isinstance(result, kinds) for result in results):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise AdapterError(f"{self._name}: {method}() must return {count} times {expected}, got {results!r:.200}")
        return list(results)


def build(config: AdapterConfig) -> PluginAdapter:
    settings = config.settings
    module = outside.import_module(f'{config.where}: "module_path"', settings["module_path"])
    adapter = outside.construct(
        config.where, module, settings["class_name"], settings["adapter_params"], settings["config_class_name"]
    )
    outside.need_methods(config.where, adapter, METHODS, GUIDE)
    return PluginAdapter(adapter, config)
