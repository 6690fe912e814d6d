"""`nixl_store_dynamic`: the folder of `fs_native` (docs/formats/files.md), its files moved by NIXL."""

from __future__ import annotations

from lmcache.environment import SYSTEM, Environment
from lmcache.l2.adapter import Inventory
from lmcache.l2.adapters import fs_native
from lmcache.l2.adapters.nixl_agent import AgentSettings, Range, refuse_missing_plugin
from lmcache.l2.adapters.nixl_config import NixlDynamicConfig
from lmcache.l2.adapters.nixl_files import NixlFiles
from lmcache.l2.adapters.nixl_lanes import READ_LANES, WRITE_LANES, Lanes


class NixlDynamicAdapter(fs_native.FsNativeAdapter):
    verifies = False

    def __init__(self, config: NixlDynamicConfig, environment: Environment = SYSTEM) -> None:
        super().__init__(config, environment)
        self._nixl_config = config
        self._region: Range | None = None
        self._lanes: list[Lanes] = []

    def lend_memory(self, address: int, size_bytes: int) -> None:
        self._region = Range(address, size_bytes)

    async def open(self, inventory: Inventory) -> None:
        config = self._nixl_config
        settings = AgentSettings(
            config.where, config.backend, config.plugin_params, self._region, clock=self._environment.clock
        )
        counts = (WRITE_LANES, READ_LANES) if config.has_many_agents else (1,)
        self._lanes = [Lanes(f"{config.name}-nixl", settings, count) for count in counts]
        try:
            for lanes in self._lanes:
                await lanes.open()
            await super().open(inventory)
        except BaseException:
            await self._close_lanes()
            raise

    def _make_files(self) -> tuple[NixlFiles, NixlFiles]:
        config = self._nixl_config
        writes, reads = (
            NixlFiles(config.folder, lanes, direct=config.use_odirect, clock=self._environment.clock)
            for lanes in (self._lanes[0], self._lanes[-1])
        )
        return writes, reads

    async def close(self) -> None:
        await super().close()
        await self._close_lanes()

    async def _close_lanes(self) -> None:
        for lanes in self._lanes:
            await lanes.close()


def check(config: NixlDynamicConfig) -> list[str]:
    """The `AdapterType.check` of this type."""
    refuse_missing_plugin(config.where, config.backend)
    return fs_native.check(config)
