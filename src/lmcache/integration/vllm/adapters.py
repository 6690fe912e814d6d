"""What the LoRA adapters of an engine are: by their content, as far as the engine is known to have loaded that."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache.integration.vllm.weights import files_sample

log = logging.getLogger("lmcache.vllm")

_MAX_ADAPTERS_KEPT = 1024
_FILES = ("adapter_model.*", "adapter_config.json")  # the latter scales what the weights say

_Stamps = tuple[tuple[str, int, int, int, int], ...]


@dataclass
class _Adapter:
    stamps: _Stamps
    content: str | None  # None: not known any more


class Adapters:
    """Belongs to the scheduler's thread.

    The engine reads an adapter's files when it is loaded, and again with a later request if it has evicted it
    meanwhile; those of one that was loaded with `load_inplace` it reads in every step.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int, bool], _Adapter] = OrderedDict()

    def content(self, lora: Any) -> str | None:
        """Names the content of an adapter; None when it is not known what the engine has, which is said once."""
        reloaded = bool(getattr(lora, "load_inplace", False))
        key = lora.lora_path, lora.lora_int_id, reloaded
        stamps = _stamps(lora)
        kept = self._kept.get(key)
        if kept is None or (reloaded and stamps != kept.stamps):
            kept = self._kept[key] = _Adapter(stamps, _content(lora) if stamps else None)
            if len(self._kept) > _MAX_ADAPTERS_KEPT:
                self._kept.popitem(last=False)
            if not stamps:
                _say(lora, "its files are not in a local folder")
            elif _stamps(lora) != stamps:
                kept.content = None
                _say(lora, "its files are being changed")
        elif stamps != kept.stamps and kept.content is not None:
            kept.content = None
            _say(lora, "its files were changed after it was loaded")
        return kept.content

    def unchanged(self, lora: Any) -> bool:
        """Whether the engine has computed with what `content` named."""
        kept = self._kept.get((lora.lora_path, lora.lora_int_id, bool(getattr(lora, "load_inplace", False))))
        return kept is not None and kept.content is not None and _stamps(lora) == kept.stamps


def _say(lora: Any, reason: str) -> None:
    log.warning(
        "Requests with the LoRA adapter %s run uncached, because %s; load it from a folder that nobody writes to any "
        "more, under another path than before",
        lora.lora_name,
        reason,
    )


def _files(lora: Any) -> list[Path]:
    """What the engine reads of an adapter."""
    path = Path(lora.lora_path)
    folder = path.expanduser() if lora.lora_path.startswith("~") else path
    return sorted(file for pattern in _FILES for file in folder.glob(pattern))


def _stamps(lora: Any) -> _Stamps:
    """Changes with every write to one of the adapter's files, and when one is replaced. Empty: there are none."""
    try:
        stats = [(file.name, file.stat()) for file in _files(lora)]
    except OSError:  # it goes as we look
        return ()
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for name, stat in stats)


def _content(lora: Any) -> str | None:
    try:
        return files_sample(_files(lora))
    except OSError:
        return None
