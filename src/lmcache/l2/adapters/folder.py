"""The folder of a file adapter: names, what is in it, who writes to it, quarantine (docs/formats/files.md).

Everything here blocks and is called on background threads, apart from the functions that only make names.
"""

from __future__ import annotations

import itertools
import os
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lmcache import _native
from lmcache.core.key import CHUNK_HASH_BYTES, Namespace, UnnamedNamespace
from lmcache.core.limits import FRAME_HEADER_BYTES, MAX_QUARANTINE_BYTES, MAX_QUARANTINE_FILES
from lmcache.l2.adapters.remote_names import identify_namespace

OWN_FOLDER = ".lmcache"
QUARANTINE = "quarantine"
FOLDER_MODE = 0o770  # less the umask, as for files: KV can be turned back into prompts
FOLDER_BYTES = 4096
ENTRY_BYTES = 256  # in its folder, generously: name, temporary name, half-filled directory blocks

_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_FAN_OUT = re.compile(r"[0-9a-f]{2}")
_TEMPORARY = re.compile(r"(?:\.[0-9a-f]{64}\.)?([0-9a-f]{16})\.[0-9]+\.tmp")
_OBJECT_FOLDER = re.compile(r"/[0-9a-f]{64}/[0-9a-f]{2}")
_SCAN_THREADS = 2  # more are no faster with cached names, and lookups need the processor
_FOLDERS_AT_ONCE = 64


def make(base: str, relative: str) -> Path:
    """Makes the folders of `relative` below the base folder, each with FOLDER_MODE."""
    path = Path(base)
    for part in Path(relative).parts:
        path /= part
        path.mkdir(mode=FOLDER_MODE, exist_ok=True)
    return path


def object_path(base: str, digest_hex: str, hash_hex: str) -> str:
    """256 folders a namespace: a million objects are 4,000 files in each."""
    return f"{base}/{digest_hex}/{hash_hex[:2]}/{hash_hex}.data"


@dataclass
class Contents:
    """What a scan found. Objects are columns of one length: object i has the 32 bytes of `hashes` from 32 i on."""

    namespaces: list[Namespace] = field(default_factory=list)
    hashes: bytearray = field(default_factory=bytearray)
    used_ns: array[int] = field(default_factory=lambda: array("q"))  # since 1970
    sizes: array[int] = field(default_factory=lambda: array("Q"))  # bytes
    owners: array[int] = field(default_factory=lambda: array("I"))  # positions in `namespaces`
    empty: list[str] = field(default_factory=list)  # paths of folders that had no object in them
    temporary: list[tuple[str, str]] = field(default_factory=list)  # (path, writer)
    faults: list[OSError] = field(default_factory=list)

    def hash_of(self, index: int) -> bytes:
        return bytes(self.hashes[index * CHUNK_HASH_BYTES : (index + 1) * CHUNK_HASH_BYTES])


def scan(base: str, relative_tmp_dir: str, stop: Callable[[], bool]) -> Contents:
    """Everything with a name of this format. Other files are left alone and not counted. `stop` ends it early."""
    contents = Contents()
    for own in {OWN_FOLDER, relative_tmp_dir or OWN_FOLDER}:
        _list_temporary(Path(base, own), contents)
    for digest_hex in _folders(base, _NAMESPACE, contents.faults):
        path, faults = f"{base}/{digest_hex}", list[OSError]()
        fan_outs = [f"{path}/{name}" for name in _folders(path, _FAN_OUT, faults)]
        contents.faults += [
            fault for fault in faults if not isinstance(fault, FileNotFoundError)
        ]  # removed by another server
        if not fan_outs:
            contents.empty.append(path)
            continue
        first = len(contents.sizes)
        contents.namespaces.append(UnnamedNamespace.of(bytes.fromhex(digest_hex)))
        for start in range(0, len(fan_outs), _FOLDERS_AT_ONCE):
            if stop():
                return contents
            _list_objects(fan_outs[start : start + _FOLDERS_AT_ONCE], contents)
        namespace = _identify(base, digest_hex, contents, first, stop)
        if namespace is not None:
            contents.namespaces[-1] = namespace
        else:  # after a power failure, or of a later version: nobody asks for its objects, so they go first
            for index in range(first, len(contents.sizes)):
                contents.used_ns[index] = 0
    return contents


def remove_temporary(base: str, paths: Sequence[str]) -> None:
    """Removes abandoned temporary files, and the object folders that are empty then."""
    folders = {os.path.dirname(path) for path in paths}
    for path in paths:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
    remove_empty(base, [path for path in folders if _OBJECT_FOLDER.fullmatch(path, len(base))])


def remove_empty(base: str, folders: Iterable[str]) -> None:
    """Removes empty folders of objects or namespaces, and parents below the base that this empties. A server that is
    about to store there makes them again (native/src/file_folders.h)."""
    for path in folders:
        try:
            while path != base:
                os.rmdir(path)
                path = os.path.dirname(path)
        except OSError:
            pass  # not empty, or not removable


def stamps(base: str) -> dict[str, int]:
    """The modification time of each object folder, such as `DIGEST/3f`, in nanoseconds: when a file was last added or
    removed. Folders that cannot be read are left out."""
    found = {}
    for digest_hex in _folders(base, _NAMESPACE, []):
        for name in _folders(f"{base}/{digest_hex}", _FAN_OUT, []):
            try:
                found[f"{digest_hex}/{name}"] = os.stat(f"{base}/{digest_hex}/{name}").st_mtime_ns
            except OSError:
                pass
    return found


def objects_named(base: str, folders: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """What lies in these object folders by its name alone: (digest of a namespace, chunk hashes of 32 bytes each).
    `folders` as `stamps` names them; those that cannot be read are left out."""
    found = []
    for digest_hex, names in itertools.groupby(folders, lambda name: name.partition("/")[0]):
        paths = [f"{base}/{name}" for name in names]
        found.append((bytes.fromhex(digest_hex), _native.list_folders(paths, _SCAN_THREADS).hashes))
    return found


def first_bytes(folders: Iterable[str]) -> dict[bytes, int]:
    """The same folders as bits: by digest of a namespace those of the first bytes of its chunk hashes."""
    bits: dict[bytes, int] = {}
    for name in folders:
        digest_hex, _, first_byte = name.partition("/")
        digest = bytes.fromhex(digest_hex)
        bits[digest] = bits.get(digest, 0) | 1 << int(first_byte, 16)
    return bits


def _folders(path: str, pattern: re.Pattern[str], faults: list[OSError]) -> list[str]:
    """The matching names of its folders, sorted."""
    try:
        with os.scandir(path) as entries:
            return sorted(
                entry.name for entry in entries if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            )
    except OSError as error:
        faults.append(error)
        return []


def _list_objects(paths: Sequence[str], contents: Contents) -> None:
    """Lists the objects of the namespace that was added last."""
    found = _native.scan_folders(paths, _SCAN_THREADS)
    contents.empty += found.empty
    contents.hashes += found.hashes
    contents.used_ns.frombytes(found.used_ns)
    contents.sizes.frombytes(found.sizes)
    added = len(contents.sizes) - len(contents.owners)
    contents.owners.extend([len(contents.namespaces) - 1] * added)
    for path in found.temporary:
        _note_temporary(path, contents)
    contents.faults += [OSError(error, os.strerror(error), path) for path, error in found.unreadable]


def _list_temporary(path: Path, contents: Contents) -> None:
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                _note_temporary(entry.path, contents)
    except FileNotFoundError:
        pass
    except OSError as error:
        contents.faults.append(error)


def _note_temporary(path: str, contents: Contents) -> None:
    match = _TEMPORARY.fullmatch(os.path.basename(path))
    if match is not None and os.path.isfile(path) and not os.path.islink(path):
        contents.temporary.append((path, match[1]))


def _identify(base: str, digest_hex: str, contents: Contents, first: int, stop: Callable[[], bool]) -> Namespace | None:
    """Reads the namespace, of which the folder's name has the digest, from the header of an object; its objects are
    those from `first` on. All are tried: after a power failure the youngest may have no header."""
    for index in range(first, len(contents.sizes)):
        if stop():
            return None
        try:
            with open(object_path(base, digest_hex, contents.hash_of(index).hex()), "rb", buffering=0) as file:
                namespace = identify_namespace(file.read(FRAME_HEADER_BYTES), bytes.fromhex(digest_hex))
        except OSError:
            continue
        if namespace is not None:
            return namespace
    return None


def base_bytes(base: str) -> int:
    """Disk space of the base folder itself, which grows with the number of namespaces."""
    return max(FOLDER_BYTES, os.stat(base).st_blocks * 512)


def quarantine(base: str, digest_hex: str, hash_hex: str, now_ns: int) -> bool:
    """Moves an object to the quarantine folder, or deletes it where that fails. True if it no longer has its name.
    `now_ns`, since 1970, tells it from an earlier one with the same name there."""
    source = object_path(base, digest_hex, hash_hex)
    try:
        os.rename(source, make(base, QUARANTINE) / f"{digest_hex[:16]}_{hash_hex}_{now_ns}.data")
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
    """Deletes the oldest files beyond the limits of count and size; the bytes on disk that remain."""
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
