"""What the LoRA adapters of an engine are: by their content, as far as the engine is known to have loaded that."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lmcache.core.file_version import file_version
from lmcache.integration.engine.weight_files import files_sample

log = logging.getLogger("lmcache.vllm")

MAX_ADAPTERS_KEPT = 1024
_FILES = ("adapter_model.*", "adapter_config.json")  # the latter scales what the weights say

_Stamps = tuple[tuple[str, tuple[int, ...]], ...]


class _Key(NamedTuple):
    path: str
    number: int
    reloaded: bool


@dataclass(eq=False)
class LoadedAdapter:
    """A LoRA adapter as the engine has it, as far as is known. Kept by the requests that were named by it."""

    stamps: _Stamps
    content: str | None  # names it; None: not known, or not any more


class LoraAdapters:
    """Belongs to the scheduler's thread.

    The engine reads an adapter's files when it is loaded, and again with a later request if it has evicted it
    meanwhile; those of one that was loaded with `load_inplace` it reads in every step. It knows an adapter by its
    number alone: what was loaded last under a number is what every request with that number is computed with. While
    requests of two adapters with one number run, that may be either of them in any step.

    What is not known here: files that are replaced after the engine has loaded an adapter and before its first request.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[_Key, LoadedAdapter] = OrderedDict()  # least recently used first
        self._latest: dict[int, _Key] = {}  # by number; among `_kept`
        self._running: dict[str, _Key] = {}  # by request, the uncached ones too
        self._running_with: dict[int, Counter[_Key]] = {}  # how many of `_running`, by number

    def request_begins(self, request_id: str, lora: Any) -> None:
        """Called for every request with an adapter, before it is named."""
        if request_id not in self._running:
            key = self._running[request_id] = _key(lora)
            self._running_with.setdefault(key.number, Counter())[key] += 1

    def request_ended(self, request_id: str) -> None:
        key = self._running.pop(request_id, None)
        if key is None:
            return
        running = self._running_with[key.number]
        running[key] -= 1
        if not running[key]:
            del running[key]
        if not running:
            del self._running_with[key.number]

    def named(self, lora: Any) -> LoadedAdapter | None:
        """None when it is not known what the engine has, which is logged once."""
        key = _key(lora)
        if self._running_with.get(key.number, {}).keys() - {key}:
            self._conflict(lora, key.number)
            return None
        stamps = _stamps(lora)
        kept = self._kept.get(key)
        if kept is None or (key.reloaded and (stamps != kept.stamps or self._latest.get(key.number) != key)):
            kept = self._loaded(lora, key, stamps)
        elif stamps != kept.stamps and kept.content is not None:
            kept.content = None
            _warn(lora, "its files were changed after it was loaded")
        self._kept.move_to_end(key)
        return kept if kept.content is not None else None

    def _conflict(self, lora: Any, number: int) -> None:
        """From now on nothing is known of what the engine has under this number, until it is read anew."""
        conflict = _Key("", number, True)
        if self._latest.get(number) == conflict:
            return
        for key in [key for key in self._kept if key.number == number]:
            self._kept.pop(key).content = None
        self._keep(conflict, LoadedAdapter((), None))
        _warn(lora, f"requests with another adapter of its number {number} run beside them")

    def unchanged(self, lora: Any, adapter: LoadedAdapter) -> bool:
        """Whether the engine has computed with what a request was named by."""
        return adapter.content is not None and _stamps(lora) == adapter.stamps

    def _loaded(self, lora: Any, key: _Key, stamps: _Stamps) -> LoadedAdapter:
        previous = self._latest.get(key.number)
        for other, adapter in self._kept.items():
            if other.number == key.number:
                adapter.content = None  # requests that were named by it may be computed with this one from now on
        kept = LoadedAdapter(stamps, _content(lora) if stamps else None)
        self._keep(key, kept)
        if not stamps:
            _warn(lora, "its files are not in a local folder")
        elif _stamps(lora) != stamps:
            kept.content = None
            _warn(lora, "its files are being changed")
        elif previous not in (None, key) and not key.reloaded:
            kept.content = None
            _warn(lora, f"its number {key.number} was another adapter's, which the engine may still have")
        return kept

    def _keep(self, key: _Key, adapter: LoadedAdapter) -> None:
        self._kept[key] = adapter
        self._latest[key.number] = key
        if len(self._kept) > MAX_ADAPTERS_KEPT:
            oldest, _ = self._kept.popitem(last=False)
            if self._latest.get(oldest.number) == oldest:
                del self._latest[oldest.number]


def _key(lora: Any) -> _Key:
    return _Key(lora.lora_path, lora.lora_int_id, bool(getattr(lora, "load_inplace", False)))


def _warn(lora: Any, reason: str) -> None:
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
        return tuple((file.name, file_version(file.stat())) for file in _files(lora))
    except OSError:  # it goes as we look
        return ()


def _content(lora: Any) -> str | None:
    try:
        return files_sample(_files(lora))
    except OSError:
        return None
