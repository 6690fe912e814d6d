"""The keys of `nixl_store` and `nixl_store_dynamic`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from lmcache.core.limits import GIB
from lmcache.l2.adapter_config import MAX_GB, AdapterConfig
from lmcache.l2.adapters.folder_config import IoEngine

FileBackend = Literal["POSIX", "GDS", "GDS_MT", "HF3FS"]
Backend = Literal["POSIX", "GDS", "GDS_MT", "HF3FS", "OBJ", "AZURE_BLOB"]

MAX_POOL_SIZE = 1 << 20
OBJECT_BACKENDS = ("OBJ", "AZURE_BLOB")
DEFAULT_PREFIX = "lmcache"

_FILE_PARAMS = ("file_path", "use_direct_io")
_OBJECT_PARAMS = ("object_prefix",)
_OWN_PARAMS = (*_FILE_PARAMS, *_OBJECT_PARAMS, "max_capacity_gb")
_STRINGS = "an object whose values are strings"

Params = dict[str, str]


class NixlConfig(AdapterConfig, frozen=True, kw_only=True):
    """What names a backend of NIXL and what it is given."""

    backend: Annotated[Backend, Meta(description="NIXL's plugin")]
    backend_params: Annotated[
        Params,
        Meta(
            description="file_path (folder) and use_direct_io (true or false, past the page cache) of the file "
            "backends, object_prefix (of names) of the others, max_capacity_gb (as the key of that name); everything "
            "else is handed to NIXL's plugin",
            extra={"expected": _STRINGS},
        ),
    ] = {}

    def __post_init__(self) -> None:
        if self.backend not in OBJECT_BACKENDS:
            for name in _FILE_PARAMS:
                if not self.backend_params.get(name):
                    raise ValueError(f'"backend_params" needs "{name}" for "backend" "{self.backend}".')
            if (given := self.backend_params["use_direct_io"]) not in ("true", "false"):
                raise ValueError(f'"use_direct_io" in "backend_params" must be "true" or "false"; got "{given}".')
        given = self.backend_params.get("max_capacity_gb", "0")
        try:
            valid = 0 <= float(given) <= MAX_GB
        except ValueError:
            valid = False
        if not valid:
            raise ValueError(
                f'"max_capacity_gb" in "backend_params" must be a number from 0 to {MAX_GB} as a string; got "{given}".'
            )
        super().__post_init__()

    @property
    def limit_bytes(self) -> int | None:
        limits = (self.max_capacity_gb, float(self.backend_params.get("max_capacity_gb", "0")))
        return min((int(limit * GIB) for limit in limits if limit), default=None)

    def notes(self) -> list[str]:
        idle = _FILE_PARAMS if self.backend in OBJECT_BACKENDS else _OBJECT_PARAMS
        return [
            *super().notes(),
            *(
                f'{self.where}: "{name}" in "backend_params" has no effect on "backend" "{self.backend}".'
                for name in idle
                if name in self.backend_params
            ),
        ]

    @property
    def is_shared(self) -> bool:
        return self.backend in OBJECT_BACKENDS

    @property
    def folder(self) -> str:
        path = self.backend_params.get("file_path", "")
        return os.path.abspath(path) if path and self.backend not in OBJECT_BACKENDS else ""

    @property
    def use_odirect(self) -> bool:
        return self.backend_params.get("use_direct_io") == "true"

    @property
    def plugin_params(self) -> Mapping[str, str]:
        """What NIXL's plugin is given."""
        return {name: value for name, value in self.backend_params.items() if name not in _OWN_PARAMS}

    @property
    def has_many_agents(self) -> bool:
        """Whether agents may register the same memory side by side. Drivers of the others may refuse that, so these
        get one agent, and transfers wait for each other."""
        return self.backend in ("POSIX", *OBJECT_BACKENDS)


class NixlStoreConfig(NixlConfig, frozen=True, kw_only=True):
    """A pool of files or objects of NIXL's storage backends, made in advance, for one server alone."""

    bounds_itself = True

    pool_size: Annotated[
        int, Meta(ge=1, le=MAX_POOL_SIZE, description="files or objects of the pool, each for one KV object")
    ]

    @property
    def object_prefix(self) -> str:
        """What the names of the pool's objects begin with."""
        return self.backend_params.get("object_prefix", DEFAULT_PREFIX).strip("/")


class NixlDynamicConfig(NixlConfig, frozen=True, kw_only=True):
    """One file an object, moved by NIXL. It may share a folder with fs, fs_native and other servers."""

    # What `fs_native`, whose folders these are, asks of its configuration beside.
    folder_key: ClassVar[str] = "file_path"
    tmp_folder: ClassVar[str] = ""
    engine: ClassVar[IoEngine] = "posix"
    read_ahead_size: ClassVar[int | None] = None
    threads: ClassVar[int] = 1

    backend: Annotated[FileBackend, Meta(description="NIXL's plugin")]
    backend_params: Annotated[
        Params,
        Meta(
            description="file_path (folder), use_direct_io (true or false, past the page cache) and max_capacity_gb "
            "(as the key of that name); everything else is handed to NIXL's plugin",
            extra={"expected": _STRINGS},
        ),
    ]
