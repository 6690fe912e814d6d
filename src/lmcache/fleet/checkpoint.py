"""The directory in a file, so that a coordinator that is started again knows it before everything was told again. The
format is docs/formats/fleet-checkpoint.md.

Each server's place in its stream of events is taken before the copies: what was told meanwhile may be in the file or
not, and then the next event shows a gap, and is told again.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import msgspec

from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.errors import ConfigError
from lmcache.fleet.directory import Directory, PlaceName
from lmcache.fleet.events import EventIntake, Stream
from lmcache.fleet.instances import Instance, Instances

MAGIC = b"LMCFLEET"
VERSION = 1
PAGE_COPIES = 8192  # whose names fit a section, each as long as it may be
_HEAD = struct.Struct("<8sI")
_LENGTH = struct.Struct("<I")
_DIGEST_BYTES = 32
_MOST_SECTION_BYTES = 64 << 20


class SavedInstance(msgspec.Struct, array_like=True):
    instance_id: str
    ip: str
    http_port: int
    metadata: dict[str, object]
    p2p_advertised_url: str
    mq_port: int
    has_token: bool
    incarnation: int
    seq: int
    needs_resync: bool
    token_digest: bytes = b""  # an addition


class SavedPlace(msgspec.Struct, array_like=True):
    instance_id: str
    tier: str
    backend: str
    shared: bool
    capacity_bytes: int


class Head(msgspec.Struct, array_like=True):
    instances: list[SavedInstance]
    places: list[SavedPlace]


class LoggedHead(Head, array_like=True):
    """Where to go on in a log of events as well; "" at its beginning."""

    log_position: str = ""


class Page(msgspec.Struct, array_like=True):
    """Copies: `positions` (u32) of their scope, `places` (u32), `hashes` (32 bytes), `sizes_bytes` (u64) of each."""

    scopes: list[bytes]
    variants: list[bytes]
    positions: bytes
    places: bytes
    hashes: bytes
    sizes_bytes: bytes


class SizedPage(Page, array_like=True):
    """The world size of each variant as well; 0: not known."""

    world_sizes: list[int] = []


class _Summed:
    """A file whose bytes are summed up on their way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sum = hashlib.sha256()

    def write(self, content: bytes) -> None:
        self._sum.update(content)
        self._file.write(content)

    def read(self, size_bytes: int) -> bytes:
        content = self._file.read(size_bytes)
        if len(content) != size_bytes:
            raise ConfigError("it ends too early.")
        self._sum.update(content)
        return content

    def section(self) -> bytes:
        (size_bytes,) = _LENGTH.unpack(self.read(_LENGTH.size))
        if size_bytes > _MOST_SECTION_BYTES:
            raise ConfigError("it is damaged.")
        return self.read(size_bytes)

    def put_section(self, content: bytes) -> None:
        self.write(_LENGTH.pack(len(content)) + content)

    def digest(self) -> bytes:
        return self._sum.digest()


def write(file: BinaryIO, instances: Instances, intake: EventIntake) -> None:
    """A page at a time, beside other calls."""
    out, directory = _Summed(file), intake.directory
    log_position = intake.log_position  # before the streams: what comes twice is known by its numbers
    streams = intake.streams()
    saved = []
    for instance in instances.all():
        stream = streams.get(instance.instance_id, Stream())
        saved.append(
            SavedInstance(
                *(instance.instance_id, instance.ip, instance.http_port, instance.metadata),
                *(instance.p2p_advertised_url, instance.mq_port, instance.has_token),
                *(stream.incarnation, stream.seq, stream.needs_resync or stream.resyncs),
                instance.token_digest,
            )
        )
    places = directory.places()
    numbers = {(place.instance_id, place.tier, place.backend): number for number, place in enumerate(places)}
    saved_places = [
        SavedPlace(place.instance_id, place.tier, place.backend, place.shared, place.capacity_bytes) for place in places
    ]
    head = LoggedHead(saved, saved_places, log_position) if log_position else Head(saved, saved_places)
    out.write(_HEAD.pack(MAGIC, VERSION))
    out.put_section(msgspec.msgpack.encode(head))
    start, more = 0, True
    while more:
        page, names, world_sizes = directory.page(start, PAGE_COPIES)
        start = page.next_start
        more = start > 0
        rows = [row for row, name in enumerate(names) if name in numbers]  # others have come since
        if rows:
            positions, hashes, sizes_bytes = page.positions, page.hashes, page.sizes_bytes  # each a copy
            columns = (
                *(page.scopes, page.variants, _u32(positions[row] for row in rows)),
                _u32(numbers[names[row]] for row in rows),
                b"".join(hashes[row * CHUNK_HASH_BYTES : (row + 1) * CHUNK_HASH_BYTES] for row in rows),
                array("Q", [sizes_bytes[row] for row in rows]).tobytes(),
            )
            saved_page = SizedPage(*columns, world_sizes) if any(world_sizes) else Page(*columns)
            out.put_section(msgspec.msgpack.encode(saved_page))
    out.put_section(b"")
    file.write(out.digest())


def _u32(numbers: Iterable[int]) -> bytes:
    return array("I", numbers).tobytes()


def _sections(file: BinaryIO) -> Iterator[bytes]:
    """The head and then the pages. ConfigError, at the latest at the end, where it is not a whole checkpoint of this
    version."""
    source = _Summed(file)
    magic, version = _HEAD.unpack(source.read(_HEAD.size))
    if magic != MAGIC:
        raise ConfigError("it is no checkpoint of a coordinator.")
    if version != VERSION:
        raise ConfigError(f"it is of version {version}, and this coordinator reads version {VERSION}.")
    while content := source.section():
        yield content
    digest = source.digest()
    if file.read(_DIGEST_BYTES + 1) != digest:
        raise ConfigError("its checksum is not that of its content.")


def restore(file: BinaryIO, instances: Instances, intake: EventIntake, heard_at: float) -> None:
    """ConfigError: nothing was restored. The file is read twice, a page at a time."""
    kind: Any = LoggedHead
    try:
        for content in _sections(file):
            msgspec.msgpack.decode(content, type=kind)
            kind = SizedPage
        if kind is LoggedHead:
            raise ConfigError("it has nothing in it.")
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ConfigError("it is damaged.") from None
    file.seek(0)
    sections = _sections(file)
    head = msgspec.msgpack.decode(next(sections), type=LoggedHead)
    intake.log_position = head.log_position
    joined = {saved.instance_id for saved in head.instances}
    instances.restore([_instance(saved, heard_at) for saved in head.instances])
    intake.restore({saved.instance_id: _stream(saved) for saved in head.instances})
    for place in head.places:
        if place.instance_id in joined:
            intake.directory.set_capacity(
                place.instance_id, place.tier, place.backend, place.shared, place.capacity_bytes
            )
    for content in sections:
        _restore_page(msgspec.msgpack.decode(content, type=SizedPage), head.places, joined, intake.directory)


def _instance(saved: SavedInstance, heard_at: float) -> Instance:
    return Instance(
        *(saved.instance_id, saved.ip, saved.http_port, saved.metadata, saved.p2p_advertised_url, saved.mq_port),
        *(saved.has_token, heard_at, heard_at, saved.token_digest),
    )


def _stream(saved: SavedInstance) -> Stream:
    return Stream(saved.incarnation, saved.seq, saved.needs_resync)


def _restore_page(page: SizedPage, places: list[SavedPlace], joined: set[str], directory: Directory) -> None:
    groups: dict[tuple[PlaceName, int], list[int]] = {}
    positions, numbers, sizes = array("I", page.positions), array("I", page.places), array("Q", page.sizes_bytes)
    for row, (position, number) in enumerate(zip(positions, numbers, strict=True)):
        place = places[number]
        if place.instance_id in joined:
            groups.setdefault(((place.instance_id, place.tier, place.backend), position), []).append(row)
    for (name, position), rows in groups.items():
        directory.restore(
            name,
            [page.scopes[position]],
            page.variants[position],
            bytes(4 * len(rows)),
            b"".join(page.hashes[row * CHUNK_HASH_BYTES : (row + 1) * CHUNK_HASH_BYTES] for row in rows),
            array("Q", [sizes[row] for row in rows]).tobytes(),
            page.world_sizes[position] if page.world_sizes else 0,
        )
