"""The folder of a file adapter: names, what is in it, who writes to it, quarantine (docs/formats/files.md).

Everything here blocks and is called on background threads, apart from the functions that only make names.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from lmcache.core.frame import parse_header
from lmcache.core.key import Namespace
from lmcache.core.limits import FRAME_HEADER_BYTES, MAX_QUARANTINE_BYTES, MAX_QUARANTINE_FILES

OWN_FOLDER = ".lmcache"
QUARANTINE = "quarantine"
FOLDER_MODE = 0o770  # less the umask, as for files: KV can be turned back into prompts
FOLDER_BYTES = 4096

_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_FAN_OUT = re.compile(r"[0-9a-f]{2}")
_OBJECT = re.compile(r"([0-9a-f]{64})\.data")
_TEMPORARY = re.compile(r"(?:\.[0-9a-f]{64}\.)?([0-9a-f]{16})\.[0-9]+\.tmp")
_HEADERS_TRIED = 8


def make(base: str, relative: str) -> Path:
    """Makes folders of ours below the base folder, each with our mode."""
    path = Path(base)
    for part in Path(relative).parts:
        path /= part
        path.mkdir(mode=FOLDER_MODE, exist_ok=True)
    return path


def object_folder(digest_hex: str, hash_hex: str) -> str:
    """Relative. 256 folders a namespace: a million objects are 4,000 files in each."""
    return f"{digest_hex}/{hash_hex[:2]}"


def object_path(base: str, digest_hex: str, hash_hex: str) -> str:
    return f"{base}/{digest_hex}/{hash_hex[:2]}/{hash_hex}.data"


@dataclass
class FoundNamespace:
    """`namespace` is None when no file in it has a readable header. Objects: (last use in seconds, hash, bytes)."""

    digest_hex: str
    namespace: Namespace | None
    objects: list[tuple[float, bytes, int]] = field(default_factory=list)


@dataclass
class Contents:
    namespaces: list[FoundNamespace] = field(default_factory=list)
    folders: set[str] = field(default_factory=set)  # relative, of objects
    temporary: list[tuple[str, str]] = field(default_factory=list)  # (path, writer)
    faults: list[OSError] = field(default_factory=list)


def scan(base: str, relative_tmp_dir: str, stop: Callable[[], bool]) -> Contents:
    """Everything with a name of ours. Other files are left alone and not counted. `stop` ends it early."""
    contents = Contents()
    if relative_tmp_dir:
        _list_temporary(Path(base, relative_tmp_dir), contents)
    for namespace in _folders(Path(base), _NAMESPACE, contents):
        found = FoundNamespace(namespace.name, None)
        for fan_out in _folders(namespace, _FAN_OUT, contents):
            if stop():
                return contents
            contents.folders.add(f"{namespace.name}/{fan_out.name}")
            _list_objects(fan_out, found, contents)
        found.namespace = _identify(base, found)
        contents.namespaces.append(found)
    return contents


def stamps(base: str, folders: Iterable[str]) -> dict[str, int]:
    """When something was last added to or removed from each folder, in nanoseconds; 0 where it is gone."""
    found = {}
    for name in folders:
        try:
            found[name] = os.stat(f"{base}/{name}").st_mtime_ns
        except OSError:
            found[name] = 0
    return found


def _folders(path: Path, pattern: re.Pattern[str], contents: Contents) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(
                Path(entry.path)
                for entry in entries
                if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            )
    except OSError as error:
        contents.faults.append(error)
        return []


def _list_objects(path: Path, found: FoundNamespace, contents: Contents) -> None:
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                match = _OBJECT.fullmatch(entry.name)
                if match is None:
                    _note_temporary(entry, contents)
                    continue
                if not match[1].startswith(path.name) or not entry.is_file(follow_symlinks=False):
                    continue
                try:
                    info = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # deleted meanwhile
                size = max(info.st_size, info.st_blocks * 512)
                found.objects.append((max(info.st_atime, info.st_mtime), bytes.fromhex(match[1]), size))
    except OSError as error:
        contents.faults.append(error)


def _list_temporary(path: Path, contents: Contents) -> None:
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                _note_temporary(entry, contents)
    except FileNotFoundError:
        pass
    except OSError as error:
        contents.faults.append(error)


def _note_temporary(entry: os.DirEntry[str], contents: Contents) -> None:
    match = _TEMPORARY.fullmatch(entry.name)
    if match is not None and entry.is_file(follow_symlinks=False):
        contents.temporary.append((entry.path, match[1]))


def _identify(base: str, found: FoundNamespace) -> Namespace | None:
    """A folder has the digest of its namespace for a name; the namespace itself is in every header."""
    for _, chunk_hash, _ in found.objects[:_HEADERS_TRIED]:
        try:
            with open(object_path(base, found.digest_hex, chunk_hash.hex()), "rb", buffering=0) as file:
                namespace = Namespace.decode(parse_header(file.read(FRAME_HEADER_BYTES)).namespace)
        except (OSError, ValueError, msgspec.MsgspecError):
            continue
        if namespace.digest.hex() == found.digest_hex:
            return namespace
    return None


def quarantine(base: str, digest_hex: str, hash_hex: str) -> bool:
    """Moves an object aside, or deletes it where that fails. True when it no longer has its name."""
    source = object_path(base, digest_hex, hash_hex)
    try:
        os.rename(source, make(base, QUARANTINE) / f"{digest_hex[:16]}_{hash_hex}_{time.time_ns()}.data")
        trim_quarantine(base)
    except FileNotFoundError:
        pass  # another server was faster
    except OSError:
        try:
            os.unlink(source)
        except FileNotFoundError:
            pass
        except OSError:
            return False
    return True


def trim_quarantine(base: str) -> int:
    """Keeps the youngest within the limits of count and size; what remains, in bytes on disk."""
    folder = Path(base, QUARANTINE)
    kept: list[tuple[float, int, str]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(".data") and entry.is_file(follow_symlinks=False):
                    info = entry.stat(follow_symlinks=False)
                    kept.append((info.st_ctime, info.st_blocks * 512, entry.path))
    except FileNotFoundError:
        return 0
    kept.sort()
    total = sum(size for _, size, _ in kept)
    while kept and (len(kept) > MAX_QUARANTINE_FILES or total > MAX_QUARANTINE_BYTES):
        _, size, path = kept.pop(0)
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        total -= size
    return total + os.stat(folder).st_blocks * 512
