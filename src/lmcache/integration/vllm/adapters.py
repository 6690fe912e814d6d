"""What the LoRA adapters of an engine are: by their content, as far as the engine is known to have loaded that."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lmcache.integration.vllm.weights import files_sample

log = logging.getLogger("lmcache.vllm")

_MAX_ADAPTERS_KEPT = 1024
_FILES = ("adapter_model.*", "adapter_config.json")  # the latter scales what the weights say

_Stamps = tuple[tuple[str, int, int, int, int], ...]


class _Key(NamedTuple):
    path: str
    number: int
    reloaded: bool


@dataclass(eq=False)
class Adapter:
    """What the engine has of an adapter, as far as is known. Kept by the requests that were named by it."""

    stamps: _Stamps
    content: str | None  # names it; None: not known, or not any more


class Adapters:
    """Belongs to the scheduler's thread.

    The engine reads an adapter's files when it is loaded, and again with a later request if it has evicted it
    meanwhile; those of one that was loaded with `load_inplace` it reads in every step. It knows an adapter by its
    number alone: what was loaded last under a number is what every request with that number is computed with.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[_Key, Adapter] = OrderedDict()  # least recently used first
        self._latest: dict[int, _Key] = {}  # by number; among `_kept`

    def named(self, lora: Any) -> Adapter | None:
        """None when it is not known what the engine has, which is said once."""
        key = _Key(lora.lora_path, lora.lora_int_id, bool(getattr(lora, "load_inplace", False)))
        stamps = _stamps(lora)
        kept = self._kept.get(key)
        if kept is None or (key.reloaded and (stamps != kept.stamps or self._latest.get(key.number) != key)):
            kept = self._loaded(lora, key, stamps)
        elif stamps != kept.stamps and kept.content is not None:
            kept.content = None
            _say(lora, "its files were changed after it was loaded")
        self._kept.move_to_end(key)
        return kept if kept.content is not None else None

    def unchanged(self, lora: Any, named: Adapter) -> bool:
        """Whether the engine has computed with what a request was named by."""
        return named.content is not None and _stamps(lora) == named.stamps

    def _loaded(self, lora: Any, key: _Key, stamps: _Stamps) -> Adapter:
        former = self._latest.get(key.number)
        for other, adapter in self._kept.items():
            if other.number == key.number:
                adapter.content = None  # requests that were named by it may be computed with this one from now on
        kept = self._kept[key] = Adapter(stamps, _content(lora) if stamps else None)
        self._latest[key.number] = key
        if len(self._kept) > _MAX_ADAPTERS_KEPT:
            gone, _ = self._kept.popitem(last=False)
            if self._latest.get(gone.number) == gone:
                del self._latest[gone.number]
        if not stamps:
            _say(lora, "its files are not in a local folder")
        elif _stamps(lora) != stamps:
            kept.content = None
            _say(lora, "its files are being changed")
        elif former not in (None, key) and not key.reloaded:
            kept.content = None
            _say(lora, f"its number {key.number} was another adapter's, which the engine may still have")
        return kept


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
