"""`fs` for any file system: the machinery and the folder of `fs_native` (docs/formats/files.md), with a fixed number of
threads. The two may share a folder and follow one another in it."""

from __future__ import annotations

from dataclasses import replace

from lmcache.l2.adapters.fs_native import KEYS as FS_NATIVE_KEYS
from lmcache.l2.adapters.fs_native import FsNativeAdapter
from lmcache.l2.config import AdapterConfig

THREADS = 4

KEYS = tuple(
    key for key in FS_NATIVE_KEYS if key.name in ("base_path", "relative_tmp_dir", "read_ahead_size", "use_odirect")
)


def build(config: AdapterConfig) -> FsNativeAdapter:
    return FsNativeAdapter(replace(config, settings={**config.settings, "num_workers": THREADS}))
