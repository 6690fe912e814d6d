"""The keys of `fs` and `fs_native`, which share one machinery and one kind of folder (docs/formats/files.md)."""

from __future__ import annotations

import os
from typing import Annotated, ClassVar, Literal, Protocol

from msgspec import Meta

from lmcache.l2.adapter_config import AdapterConfig, NonEmpty, Threads
from lmcache.l2.adapters.folder import OWN_FOLDER, QUARANTINE

IoEngine = Literal["auto", "posix", "io_uring"]


class FolderSettings(Protocol):
    """What an adapter with a folder of this kind is configured with."""

    @property
    def name(self) -> str: ...
    @property
    def where(self) -> str: ...
    @property
    def folder_key(self) -> str:
        """The key that names the folder, for sentences to the operator."""
        ...

    @property
    def folder(self) -> str: ...
    @property
    def tmp_folder(self) -> str: ...
    @property
    def limit_bytes(self) -> int | None: ...
    @property
    def engine(self) -> IoEngine: ...
    @property
    def threads(self) -> int: ...
    @property
    def use_odirect(self) -> bool: ...
    @property
    def read_ahead_size(self) -> int | None: ...


class FsConfig(AdapterConfig, frozen=True, kw_only=True):
    """One file an object, on any file system, by four threads. It may share a folder with fs_native."""

    folder_key: ClassVar[str] = "base_path"

    base_path: Annotated[str, NonEmpty, Meta(description="folder of the files; it is made where it does not exist")]
    relative_tmp_dir: Annotated[
        str, Meta(description="folder below base_path for files being written; by default beside their final place")
    ] = ""
    use_odirect: Annotated[bool, Meta(description="move files past the page cache, by O_DIRECT")] = False
    read_ahead_size: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 40)] | None,
        Meta(description="bytes to ask the kernel for ahead of a read; without it, what the kernel does by itself"),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = self.tmp_folder.split(os.sep)
        reserved = {OWN_FOLDER, QUARANTINE}
        if os.path.isabs(self.tmp_folder) or ".." in parts or parts[0] in reserved or len(parts) > 2:
            raise ValueError(
                '"relative_tmp_dir" must name a folder inside base_path, at most two deep, other than '
                f"{' and '.join(sorted(reserved))}; got {self.relative_tmp_dir!r}."
            )

    @property
    def folder(self) -> str:
        return os.path.abspath(self.base_path)

    @property
    def tmp_folder(self) -> str:
        """Relative to `folder`; "" for the folder of each file."""
        normal = os.path.normpath(self.relative_tmp_dir) if self.relative_tmp_dir else ""
        return "" if normal == "." else normal

    @property
    def threads(self) -> int:
        return 4

    @property
    def engine(self) -> IoEngine:
        return "posix"


class FsNativeConfig(FsConfig, frozen=True, kw_only=True):
    """One file an object, on a fast local disk, by threads or io_uring. Several servers may share the folder."""

    num_workers: Annotated[Threads, Meta(description="threads, or transfers at once with io_uring")] = 4
    io_engine: Annotated[IoEngine, Meta(description="what moves the files; auto tries both when it starts")] = "auto"

    @property
    def threads(self) -> int:
        return self.num_workers

    @property
    def engine(self) -> IoEngine:
        return self.io_engine
