"""The configuration of one adapter: the keys of its JSON, typed and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from lmcache.config.redact import HIDDEN, is_secret, shown
from lmcache.config.struct_settings import keys_of
from lmcache.core.limits import GIB, L2_DEFAULT_TIMEOUT_SECONDS
from lmcache.errors import ResourceError
from lmcache.serde.registry import SerdeChainConfig

MAX_GB = 1 << 30

# Why num_lookup_workers of some adapters has no effect.
LOOKUPS_READ_NOTHING = "the index is in memory, so a lookup reads nothing and needs no threads"

NonEmpty = Meta(min_length=1)
Threads = Annotated[int, Meta(ge=1, le=1024)]
SerdeThreads = Annotated[int, Meta(ge=1, le=64)]
Gigabytes = Annotated[float, Meta(gt=0, le=MAX_GB)]
Fraction = Annotated[float, Meta(gt=0, le=1)]


class EvictionConfig(msgspec.Struct, frozen=True):
    """When an adapter deletes objects, and which."""

    eviction_policy: Annotated[
        Literal["LRU", "IsolatedLRU", "S3FIFO", "noop"],
        Meta(description="which objects go first, as for --eviction-policy; noop deletes none"),
    ]
    trigger_watermark: Annotated[
        Fraction, Meta(description="used fraction of the capacity at which eviction starts")
    ] = 0.8
    eviction_ratio: Annotated[Fraction, Meta(description="fraction of the used bytes that one eviction frees")] = 0.2


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of every adapter type. A type adds its own in a subclass; what the keys of one demand of each other,
    `__post_init__` refuses with a ValueError that goes on after "--l2-adapter 1 (fs): "."""

    bounds_itself: ClassVar[bool] = False  # the backend has a capacity without max_capacity_gb
    forwards_other_keys: ClassVar[bool] = False  # keys that are not declared go on to the backend, in `forwarded`

    index: int  # position among the --l2-adapter options; no key
    forwarded: Mapping[str, Any] = {}  # no key either
    type: Annotated[str, Meta(min_length=1, description="the adapter type")]
    eviction: Annotated[
        EvictionConfig | None,
        Meta(description="deletes objects when the adapter is nearly full; without it a full adapter takes no more"),
    ] = None
    persist_enabled: Annotated[
        bool, Meta(description="keep the objects when the server stops; false deletes them then")
    ] = True
    timeout_seconds: Annotated[
        float, Meta(gt=0, le=86_400, description="how long an operation may take before nobody waits for it any more")
    ] = L2_DEFAULT_TIMEOUT_SECONDS
    max_capacity_gb: Annotated[
        float, Meta(ge=0, le=MAX_GB, description="bytes that objects may take, in GB of 2^30; 0 is no limit")
    ] = 0.0

    serde: Annotated[
        SerdeChainConfig | None,
        Meta(
            description="what encodes objects on their way (docs/reference/serdes.md); several in the order of storing",
            extra={"expected": 'an object such as {"type": "zstd"}, or a list of them'},
        ),
    ] = None
    serde_threads: Annotated[
        SerdeThreads | None,
        Meta(
            description="threads that encode and decode, of low priority",
            extra={"default": "a quarter of the processors, 1 to 4"},
        ),
    ] = None

    def __post_init__(self) -> None:
        if 0 < self.max_capacity_gb < 1 / GIB:
            raise ValueError(f'"max_capacity_gb" of {self.max_capacity_gb:g} is less than a byte; 0 is no limit.')
        if self.eviction is not None and self.limit_bytes is None and not self.bounds_itself:
            raise ValueError('"eviction" needs "max_capacity_gb" above 0: it is a fraction of that.')

    def __repr__(self) -> str:
        """Without what grants access: configurations get into tracebacks and logs."""
        fields = ", ".join(
            f"{name}={HIDDEN if is_secret(name) and value else repr(shown(value))}"
            for name, value in ((field, getattr(self, field)) for field in self.__struct_fields__)
        )
        return f"{type(self).__name__}({fields})"

    @property
    def name(self) -> str:
        """The adapter's name in logs, metrics (`l2_name`) and status."""
        return f"{self.type}_{self.index}"

    @property
    def where(self) -> str:
        return f"--l2-adapter {self.index + 1} ({self.type})"

    @property
    def eviction_policy(self) -> str:
        return self.eviction.eviction_policy if self.eviction is not None else "noop"

    @property
    def limit_bytes(self) -> int | None:
        """What objects may take; None: no limit."""
        return int(self.max_capacity_gb * GIB) or None

    @property
    def is_shared(self) -> bool:
        """Whether other servers read what it holds, too."""
        return False

    @property
    def folder(self) -> str:
        """The folder that its files are in, which several servers may share; "" where it has none."""
        return ""

    @property
    def device(self) -> str:
        """The device or file that it needs for itself; "" where it has none."""
        return ""

    def idle_keys(self) -> dict[str, str]:
        """Keys that change nothing beside the others, and why: the reason reads after a colon."""
        return {}

    def notes(self) -> list[str]:
        """A sentence for each key that is not at its default and has no effect."""
        defaults = {key.name: key.default for key in keys_of(type(self), INTERNAL)}
        found = [
            f'{self.where}: "{name}" has no effect: {reason}.'
            for name, reason in self.idle_keys().items()
            if getattr(self, name) != defaults[name]
        ]
        if self.eviction is not None and self.eviction.eviction_policy == "noop":
            found += [
                f'{self.where}: "{key.name}" has no effect under "eviction_policy" "noop", which evicts nothing.'
                for key in keys_of(EvictionConfig)
                if not key.required and getattr(self.eviction, key.name) != key.default
            ]
        return found

    def as_json(self) -> dict[str, Any]:
        """Every key, as it may be given to --l2-adapter; those without a value are left out."""
        values = {key.name: getattr(self, key.name) for key in keys_of(type(self), INTERNAL)}
        values["serde"] = self.serde.given if self.serde is not None else None
        given: dict[str, Any] = msgspec.to_builtins({"type": self.type, **values, **self.forwarded})
        return {name: value for name, value in given.items() if value is not None}

    def timeout_error(self) -> ResourceError:
        """For a backend that does not answer in time."""
        return ResourceError(
            f"{self.where}: the backend did not answer within {self.timeout_seconds:g} s; "
            "see whether it is up, or raise timeout_seconds."
        )


INTERNAL = frozenset({"index", "forwarded"})  # fields of an AdapterConfig that are no keys
