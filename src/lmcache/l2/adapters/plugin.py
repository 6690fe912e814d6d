"""`plugin`: an adapter that somebody else wrote against the contract (docs/how-to/write-an-adapter.md).

It gets what every adapter gets from the runner. What it returns is checked for its shape, so that a mistake is a fault
of that adapter and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError, ConfigError, LMCacheError, ResourceError
from lmcache.l2.adapter import Adapter, Capacity, Inventory, RegistersMemory
from lmcache.l2.adapter_config import AdapterConfig, NonEmpty
from lmcache.l2.adapters import plugin_loader

T = TypeVar("T")

GUIDE = "docs/how-to/write-an-adapter.md"
MAX_SIZE_BYTES = (1 << 63) - 1
METHODS = ("open", "store", "load", "probe", "delete", "clear", "close")


class OutsideConfig(AdapterConfig, frozen=True, kw_only=True):
    """What names a class that somebody else wrote."""

    module_path: Annotated[str, NonEmpty, Meta(description="module as in `import`, or the path of a .py file")]
    class_name: Annotated[str, NonEmpty, Meta(description="the adapter's class in it")]
    adapter_params: Annotated[
        dict[str, Any], Meta(description="what the class is made with: keyword arguments, or its configuration class")
    ] = {}


class PluginConfig(OutsideConfig, frozen=True, kw_only=True):
    """An adapter class of your own in Python, as docs/how-to/write-an-adapter.md describes."""

    bounds_itself = True

    config_class_name: Annotated[
        str, Meta(description="class in the same module that adapter_params are read into")
    ] = ""


class PluginAdapter:
    def __init__(self, inner: Adapter, config: PluginConfig) -> None:
        self.inner = inner
        self._name = config.name
        self._where = config.where

    @property
    def capacity(self) -> Capacity:
        """Sizes that the plugin computed as floats are whole bytes here. ResourceError for what is no size."""
        given = getattr(self.inner, "capacity", Capacity())
        sizes = {field.name: getattr(given, field.name) for field in fields(Capacity)}
        for name, size in sizes.items():
            least = 1 if name == "unit_bytes" else 0
            if size is None and name in ("limit_bytes", "largest_object_bytes", "limit_objects"):
                continue
            if not isinstance(size, int | float) or not least <= size <= MAX_SIZE_BYTES:
                raise ResourceError(f"{self._where}: capacity.{name} must be at least {least} bytes, got {size!r}")
            sizes[name] = int(size)
        return Capacity(**sizes)

    def overhead_bytes(self) -> int:
        overhead_bytes = getattr(self.inner, "overhead_bytes", None)
        return max(0, int(overhead_bytes())) if overhead_bytes else 0

    def status(self) -> dict[str, int]:
        status = getattr(self.inner, "status", None)
        return dict(status()) if status else {}

    def lend_memory(self, address: int, size_bytes: int) -> None:
        if isinstance(self.inner, RegistersMemory):
            self.inner.lend_memory(address, size_bytes)

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
            # True would be an object of one byte.
            if size is not None and (isinstance(size, bool) or not 0 <= size <= MAX_SIZE_BYTES):
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


def build(config: PluginConfig) -> PluginAdapter:
    module = plugin_loader.import_module(f'{config.where}: "module_path"', config.module_path)
    adapter = plugin_loader.construct(
        config.where, module, config.class_name, config.adapter_params, config.config_class_name
    )
    plugin_loader.need_methods(config.where, adapter, METHODS, GUIDE)
    return PluginAdapter(adapter, config)
