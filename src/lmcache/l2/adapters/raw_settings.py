"""The keys of raw_block and what follows from them before and after its device is open."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.errors import ConfigError, ResourceError
from lmcache.l2.adapters import raw_device
from lmcache.l2.adapters.raw_device import Claim, RawDevice
from lmcache.l2.adapters.raw_format import Geometry, Superblock
from lmcache.l2.config import AdapterConfig
from lmcache.l2.keys import LOOKUPS_READ_NOTHING, Key, choice, number, switch, text, whole, without_effect


def _magic(value: object) -> str:
    if not isinstance(value, str) or len(value) != 8 or not value.isascii() or not value.isprintable():
        raise ValueError("8 printable ASCII characters")
    return value


KEYS = (
    Key("device_path", text),
    Key("slot_bytes", whole(8192, 1 << 40)),
    Key("capacity_bytes", whole(0, 1 << 60), 0),
    Key("use_odirect", switch, True),
    Key("block_align", whole(512, 1 << 20), 4096),
    Key("header_bytes", whole(FRAME_HEADER_BYTES, 1 << 20), FRAME_HEADER_BYTES),
    Key("meta_total_bytes", whole(16384, 1 << 40), 256 << 20),
    Key("meta_magic", _magic, "LMCIDX01"),
    Key("meta_version", whole(1, (1 << 32) - 1), 1),
    Key("meta_checkpoint_interval_sec", number(0, 86_400, above=True), 60.0),
    Key("meta_idle_quiet_ms", whole(0, 3_600_000), 100),
    Key("meta_enable_periodic", switch, True),
    Key("meta_verify_on_load", switch, True),
    Key("load_checkpoint_on_init", switch, True),
    Key("enable_zero_copy", switch, True),
    Key("io_engine", choice(("posix", "io_uring")), "posix"),
    Key("iouring_queue_depth", whole(1, 4096), 256),
    Key("num_store_workers", whole(1, 1024), 2),
    Key("num_lookup_workers", whole(1, 1024), 1),
    Key("num_load_workers", whole(1, 1024), 4),
    Key("reformat", switch, False),
)


def idle_keys(settings: Mapping[str, Any]) -> dict[str, str]:
    """Keys that have no effect under these settings, and why."""
    found = {"num_lookup_workers": LOOKUPS_READ_NOTHING}
    if settings["io_engine"] == "io_uring":
        why = "with io_uring one thread keeps iouring_queue_depth transfers under way"
        found |= {"num_store_workers": why, "num_load_workers": why}
    else:
        found["iouring_queue_depth"] = 'it belongs to "io_engine" "io_uring"'
    if not settings["meta_enable_periodic"]:
        why = "without meta_enable_periodic the table is brought up to date when the server ends"
        found |= {"meta_checkpoint_interval_sec": why, "meta_idle_quiet_ms": why}
    return found


def plan(config: AdapterConfig) -> Geometry:
    """Where things go on the device. ConfigError where the keys do not fit each other."""
    settings = config.settings
    align, slot_bytes = settings["block_align"], settings["slot_bytes"]
    if not config.persist:
        raise ConfigError(
            f'{config.where}: "persist_enabled" must be true, as a device keeps its objects; leave the key out, or '
            'set "load_checkpoint_on_init" to false to start empty.'
        )
    if align & (align - 1):
        raise ConfigError(f'{config.where}: "block_align" must be a power of two; got {align}.')
    if slot_bytes % align:
        raise ConfigError(
            f'{config.where}: "slot_bytes" must be a multiple of block_align ({align}); got {slot_bytes}.'
        )
    if settings["header_bytes"] >= slot_bytes:
        raise ConfigError(f'{config.where}: "header_bytes" must be less than slot_bytes ({slot_bytes}).')
    geometry = Geometry.plan(slot_bytes, align, settings["meta_total_bytes"])
    if geometry.meta_total_bytes % geometry.page_bytes or geometry.max_slots <= 0:
        raise ConfigError(
            f'{config.where}: "meta_total_bytes" must be a multiple of {geometry.page_bytes} and at least '
            f"{4 * geometry.page_bytes}; got {geometry.meta_total_bytes}."
        )
    return geometry


def check(config: AdapterConfig) -> list[str]:
    """As `AdapterType.check`."""
    geometry = plan(config)
    try:
        device = _open(raw_device.look_at, config)
        with contextlib.closing(device):
            _, note = _usable_slots(config, geometry, device)
            claim = _claim(config, geometry, device)
    except OSError as error:
        raise unusable(config, error) from None
    idle = without_effect(config.where, config.settings, KEYS, idle_keys(config.settings))
    return [sentence for sentence in (note, claim.note) if sentence] + idle


def open_and_claim(config: AdapterConfig, geometry: Geometry) -> tuple[RawDevice, Claim, int]:
    """Opens, locks, and formats where it must; blocks. The last is the number of slots. ConfigError, ResourceError or
    OSError."""
    device = _open(raw_device.open_device, config)
    try:
        slots, _ = _usable_slots(config, geometry, device)
        claim = _claim(config, geometry, device)
        if claim.is_new:
            table_bytes = geometry.table_pages(slots) * geometry.page_bytes
            raw_device.format_device(device, claim.superblock, geometry.table_offset + table_bytes)
    except BaseException:
        device.close()
        raise
    return device, claim, slots


def unusable(config: AdapterConfig, error: OSError) -> ResourceError:
    return ResourceError(
        f"{config.where}: cannot use {config.settings['device_path']}: {error.strerror or error}; "
        "see the kernel's log, or choose another device."
    )


def _open(how: Callable[..., RawDevice], config: AdapterConfig) -> RawDevice:
    settings = config.settings
    return how(
        settings["device_path"], config.where, direct=settings["use_odirect"], block_align=settings["block_align"]
    )


def _claim(config: AdapterConfig, geometry: Geometry, device: RawDevice) -> Claim:
    settings = config.settings
    wanted = Superblock(
        device=os.urandom(16),
        sequence=1,
        geometry=geometry,
        header_bytes=settings["header_bytes"],
        meta_magic=settings["meta_magic"].encode(),
        meta_version=settings["meta_version"],
        first_generation=1,
    )
    return raw_device.claim(device, wanted, config.where, reformat=settings["reformat"])


def _usable_slots(config: AdapterConfig, geometry: Geometry, device: RawDevice) -> tuple[int, str]:
    """How many, and a sentence for the operator where there could be more."""
    caps = [cap for cap in (config.settings["capacity_bytes"], config.capacity_bytes) if cap]
    usable_bytes = min([device.size_bytes, *caps])
    slots = geometry.slots_in(usable_bytes)
    if slots == 0:
        raise ConfigError(
            f"{config.where}: {device.path} offers {usable_bytes} bytes, but meta_total_bytes and one slot take "
            f"{geometry.meta_total_bytes + geometry.slot_bytes}; use a larger device or capacity_bytes, or a smaller "
            "meta_total_bytes."
        )
    if slots <= geometry.max_slots:
        return slots, ""
    return geometry.max_slots, (
        f"{config.where}: meta_total_bytes {geometry.meta_total_bytes} has room for {geometry.max_slots} of {slots} "
        f"slots and the rest stays unused; {geometry.meta_bytes_for(slots)} would do for all."
    )
