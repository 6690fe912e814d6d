"""The keys of raw_block, and how its device is checked, opened and claimed by them."""

from __future__ import annotations

import contextlib
from typing import Annotated, Literal

from msgspec import Meta

from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.environment import Environment
from lmcache.errors import ConfigError, ResourceError
from lmcache.l2.adapter_config import LOOKUPS_READ_NOTHING, AdapterConfig, NonEmpty, Threads
from lmcache.l2.adapters import raw_device
from lmcache.l2.adapters.raw_device import Claim, RawDevice
from lmcache.l2.adapters.raw_format import DEVICE_ID_BYTES, Geometry, Superblock


class RawBlockConfig(AdapterConfig, frozen=True, kw_only=True):
    """Slots of one size on a raw block device or in a file of fixed size, for one server alone."""

    bounds_itself = True

    device_path: Annotated[str, NonEmpty, Meta(description="block device, or file that has its final size")]
    slot_bytes: Annotated[
        int, Meta(ge=8192, le=1 << 40, description="a slot, header included; a multiple of block_align")
    ]
    capacity_bytes: Annotated[int, Meta(ge=0, le=1 << 60, description="how much of the device is used; 0 is all")] = 0
    use_odirect: Annotated[bool, Meta(description="move objects past the page cache, by O_DIRECT")] = True
    block_align: Annotated[
        int, Meta(ge=512, le=1 << 20, description="alignment of the device, a power of two; see --l1-align-bytes")
    ] = 4096
    header_bytes: Annotated[
        int, Meta(ge=FRAME_HEADER_BYTES, le=1 << 20, description="part of a slot that is not for the payload")
    ] = FRAME_HEADER_BYTES
    meta_total_bytes: Annotated[
        int, Meta(ge=16_384, le=1 << 40, description="part of the device for the table of what it holds")
    ] = 256 << 20
    meta_magic: Annotated[
        str,
        Meta(
            pattern=r"\A[ -~]{8}\Z",
            description="name of the cache; a device with another one is refused",
            extra={"expected": "8 printable ASCII characters"},
        ),
    ] = "LMCIDX01"
    meta_version: Annotated[
        int, Meta(ge=1, le=(1 << 32) - 1, description="version of the content; another one starts empty")
    ] = 1
    meta_checkpoint_interval_sec: Annotated[
        float, Meta(gt=0, le=86_400, description="how often the order of use is written to the device")
    ] = 60.0
    meta_idle_quiet_ms: Annotated[
        int, Meta(ge=0, le=3_600_000, description="how long nothing was moved before it is written")
    ] = 100
    meta_enable_periodic: Annotated[
        bool, Meta(description="write the order of use now and then; false writes it when the server stops")
    ] = True
    meta_verify_on_load: Annotated[
        bool, Meta(description="compare the table with the headers of the slots after a start, in the background")
    ] = True
    load_checkpoint_on_init: Annotated[
        bool, Meta(description="go on with what the device holds; false starts empty")
    ] = True
    enable_zero_copy: Annotated[bool, Meta(description="transfer from and to L1 itself where it is aligned")] = True
    io_engine: Annotated[Literal["posix", "io_uring"], Meta(description="what moves the objects")] = "posix"
    iouring_queue_depth: Annotated[
        int, Meta(ge=1, le=4096, description="transfers at once with io_uring, of loads and of stores each")
    ] = 256
    num_store_workers: Annotated[Threads, Meta(description="threads that write")] = 2
    num_lookup_workers: Annotated[Threads, Meta(description=f"no effect: {LOOKUPS_READ_NOTHING}")] = 1
    num_load_workers: Annotated[Threads, Meta(description="threads that read")] = 4
    reformat: Annotated[bool, Meta(description="format a device that holds something else, which destroys it")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.persist_enabled:
            raise ValueError(
                '"persist_enabled" must be true, as a device keeps its objects; leave the key out, or '
                'set "load_checkpoint_on_init" to false to start empty.'
            )
        align, slot_bytes = self.block_align, self.slot_bytes
        if align & (align - 1):
            raise ValueError(f'"block_align" must be a power of two; got {align}.')
        if slot_bytes % align:
            raise ValueError(f'"slot_bytes" must be a multiple of block_align ({align}); got {slot_bytes}.')
        if self.header_bytes >= slot_bytes:
            raise ValueError(f'"header_bytes" must be less than slot_bytes ({slot_bytes}).')
        geometry = self.geometry
        if geometry.meta_total_bytes % geometry.page_bytes or geometry.max_slots <= 0:
            raise ValueError(
                f'"meta_total_bytes" must be a multiple of {geometry.page_bytes} and at least '
                f"{4 * geometry.page_bytes}; got {geometry.meta_total_bytes}."
            )

    @property
    def geometry(self) -> Geometry:
        """The layout of a device that is formatted with these keys."""
        return Geometry.plan(self.slot_bytes, self.block_align, self.meta_total_bytes)

    @property
    def device(self) -> str:
        return self.device_path

    def idle_keys(self) -> dict[str, str]:
        found = {"num_lookup_workers": LOOKUPS_READ_NOTHING}
        if self.io_engine == "io_uring":
            why = "with io_uring one thread keeps iouring_queue_depth transfers under way"
            found |= {"num_store_workers": why, "num_load_workers": why}
        else:
            found["iouring_queue_depth"] = 'it belongs to "io_engine" "io_uring"'
        if not self.meta_enable_periodic:
            why = "without meta_enable_periodic the table is brought up to date when the server ends"
            found |= {"meta_checkpoint_interval_sec": why, "meta_idle_quiet_ms": why}
        return found


def check(config: RawBlockConfig) -> list[str]:
    """The `AdapterType.check` of this type."""
    try:
        device = raw_device.look_at(
            config.device_path, config.where, direct=config.use_odirect, block_align=config.block_align
        )
        with contextlib.closing(device):
            _, notes = _usable_slots(config, device)
            claim = _claim(config, device, bytes(DEVICE_ID_BYTES))
    except OSError as error:
        raise unusable(config, error) from None
    return [*notes, *filter(None, [claim.note])]


def open_and_claim(config: RawBlockConfig, environment: Environment) -> tuple[RawDevice, Claim, int]:
    """Opens, locks and, where needed, formats the device: (device, claim, number of slots). Blocks. ConfigError,
    ResourceError or OSError."""
    device = raw_device.open_device(
        config.device_path,
        config.where,
        direct=config.use_odirect,
        block_align=config.block_align,
        clock=environment.clock,
    )
    try:
        slots, _ = _usable_slots(config, device)
        claim = _claim(config, device, environment.random_bytes(DEVICE_ID_BYTES))
        if claim.is_new:
            geometry = config.geometry
            table_bytes = geometry.table_pages(slots) * geometry.page_bytes
            raw_device.format_device(device, claim.superblock, geometry.table_offset + table_bytes)
    except BaseException:
        device.close()
        raise
    return device, claim, slots


def unusable(config: RawBlockConfig, error: OSError) -> ResourceError:
    return ResourceError(
        f"{config.where}: cannot use {config.device_path}: {error.strerror or error}; "
        "see the kernel's log, or choose another device."
    )


def _claim(config: RawBlockConfig, device: RawDevice, device_id: bytes) -> Claim:
    """`device_id`: of the cache, should the device be new."""
    wanted = Superblock(
        device=device_id,
        sequence=1,
        geometry=config.geometry,
        header_bytes=config.header_bytes,
        meta_magic=config.meta_magic.encode(),
        meta_version=config.meta_version,
        first_generation=1,
    )
    return raw_device.claim(device, wanted, config.where, reformat=config.reformat)


def _usable_slots(config: RawBlockConfig, device: RawDevice) -> tuple[int, list[str]]:
    """Their number, and warnings where it is another one than the keys let expect."""
    geometry = config.geometry
    caps = [cap for cap in (config.capacity_bytes, config.limit_bytes) if cap]
    usable_bytes = min([device.size_bytes, *caps])
    notes = []
    if config.capacity_bytes > device.size_bytes:
        notes.append(
            f"{config.where}: capacity_bytes {config.capacity_bytes} is more than the {device.size_bytes} bytes of "
            f"{device.path}, which are all that is used; lower it, or use a larger device."
        )
    slots = geometry.slots_in(usable_bytes)
    if slots == 0:
        raise ConfigError(
            f"{config.where}: {device.path} offers {usable_bytes} bytes, but meta_total_bytes and one slot take "
            f"{geometry.meta_total_bytes + geometry.slot_bytes}; use a larger device or capacity_bytes, or a smaller "
            "meta_total_bytes."
        )
    if slots <= geometry.max_slots:
        return slots, notes
    notes.append(
        f"{config.where}: meta_total_bytes {geometry.meta_total_bytes} has room for {geometry.max_slots} of {slots} "
        f"slots and the rest stays unused; {geometry.meta_bytes_for(slots)} would do for all."
    )
    return geometry.max_slots, notes
