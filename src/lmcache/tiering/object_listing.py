"""Pages of all objects, tier by tier. A page is made in bounded steps under the locks of the indexes, and its text by
the core without the GIL.

A token says where to go on: the tier and the number of a record. Objects keep their records, so that one which stays is
listed once, whatever else comes and goes; one that is stored meanwhile may be missed, or listed again where it has gone
and come back.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from lmcache.core import limits
from lmcache.core.key import Namespace, UnnamedNamespace, decode_known, stored_serde
from lmcache.errors import ConfigError
from lmcache.l1.store import L1Store
from lmcache.l2.runner import Runner
from lmcache.tiering.namespace_directory import NamespaceDirectory, served_namespace

_STEP_OBJECTS = 1024  # under a lock at a time
_STEP_RECORDS = 16_384  # looked at for them; a ledger has the same bound
_TOKEN = re.compile(r"([0-9a-f]{8})\.(\d{1,4})\.(\d{1,10})")
_L1 = "l1"

_BETWEEN_ENTRIES = re.compile(rb',(?=\{"key":")')  # in no text of an entry: there quotes are escaped
_KEY = slice(len('{"key":"'), len('{"key":"') + 129)

_Texts = tuple[bytes, bytes, bytes]
_LEFT_OUT: _Texts = (b"", b"", b"")


@dataclass(frozen=True)
class ListingRequest:
    """`tier`: l1, l2 or all. `adapter`: only that one of l2. `model_name`: only objects of that model. `key_part`: only
    objects with it in their key. Empty: any."""

    tier: str = "all"
    adapter: str = ""
    model_name: str = ""
    key_part: str = ""
    page_objects: int = 1000
    page_token: str = ""


@dataclass(frozen=True)
class ListingPage:
    """`text`: JSON objects with commas between them."""

    text: bytes
    objects: int
    next_page_token: str


class ObjectListing:
    """Thread-safe. Belongs to nobody: indexes have their own locks."""

    def __init__(self, l1: L1Store, runners: Sequence[Runner], directory: NamespaceDirectory, mark: str) -> None:
        """`mark`: 8 hex digits, random and of this server: another one's tokens name other records."""
        self._l1 = l1
        self._runners = runners
        self._directory = directory
        self._mark = mark

    def page(self, request: ListingRequest) -> ListingPage:
        """ConfigError for a token of another server, and for an adapter that there is not."""
        sources = self._sources(request)
        position, start = self._place(request.page_token, len(sources))
        texts: list[bytes] = []
        objects = examined = 0
        while (
            position < len(sources) and objects < request.page_objects and examined < limits.MAX_HTTP_EXAMINED_OBJECTS
        ):
            wanted = min(_STEP_OBJECTS, request.page_objects - objects)
            text, count, start = self._step(sources[position], start, wanted, request)
            if request.key_part and count:
                text, count = _with_key_part(text, request.key_part.encode())
            if count:
                texts.append(text)
                objects += count
            examined += _STEP_RECORDS
            if not start:
                position += 1
        token = f"{self._mark}.{position}.{start}" if position < len(sources) else ""
        return ListingPage(b",".join(texts), objects, token)

    def _sources(self, request: ListingRequest) -> list[Runner | None]:
        """None stands for L1."""
        if request.adapter:
            runners = [runner for runner in self._runners if runner.name == request.adapter]
            if not runners or request.tier == _L1:
                names = ", ".join(runner.name for runner in self._runners) or "none"
                raise ConfigError(f'There is no adapter "{request.adapter}" in this tier; the adapters of l2: {names}.')
            return list(runners)
        first: list[Runner | None] = [] if request.tier == "l2" else [None]
        return first if request.tier == _L1 else [*first, *self._runners]

    def _place(self, token: str, sources: int) -> tuple[int, int]:
        if not token:
            return 0, 0
        match = _TOKEN.fullmatch(token)
        if match is None or match[1] != self._mark or int(match[2]) >= sources or int(match[3]) >= 2**32:
            raise ConfigError("The page token is not of this listing of this server: begin again without one.")
        return int(match[2]), int(match[3])

    def _step(self, source: Runner | None, start: int, wanted: int, request: ListingRequest) -> tuple[bytes, int, int]:
        if source is None:
            page = self._l1.core.list_objects(start, wanted, _STEP_RECORDS)
            namespaces = [self._directory.of_l1_object(digest, chunk_hash) for digest, chunk_hash in page.namespaces]
            text, count = page.listing([_wanted(_texts(space, _L1, ""), space, request) for space in namespaces])
            return text, count, page.next_start
        held = source.ledger.native.list(start, wanted)
        stored = [decode_known(encoded) for encoded in held.namespaces]
        serde = source.serde_name
        text, count = held.listing([_wanted(_texts(space, source.name, serde), space, request) for space in stored])
        return text, count, held.next_start


def _with_key_part(text: bytes, part: bytes) -> tuple[bytes, int]:
    """Those of the entries that have it in their key, and how many."""
    found = [entry for entry in _BETWEEN_ENTRIES.split(text) if part in entry[_KEY]]
    return b",".join(found), len(found)


def _wanted(texts: _Texts, namespace: Namespace, request: ListingRequest) -> _Texts:
    """Leaves out namespaces of another model, and those that a part of a key with a slash is not of: the core passes
    over their objects, and of millions that is nearly all."""
    if not request.model_name and not request.key_part:
        return texts
    of_model = not isinstance(namespace, UnnamedNamespace) and namespace.model_name == request.model_name
    end_of_namespace, slash, _ = request.key_part.partition("/")
    of_key = not slash or texts[0].endswith(f"{end_of_namespace}/".encode())
    return texts if (of_model or not request.model_name) and of_key else _LEFT_OUT


@lru_cache(4096)
def _texts(stored: Namespace, tier: str, serde: str) -> _Texts:
    """`serde` is that of the tier. The key of an entry is the one that requests use."""
    served = served_namespace(stored, serde)
    is_named = not isinstance(served, UnnamedNamespace)
    fields = {
        "tier": tier,
        "model_name": served.model_name if is_named else "",
        "rank": served.rank,
        "world_size": served.world_size,
        "object_group": served.object_group,
        "layout": served.layout,
        "cache_salt": served.cache_salt,
        "serde": stored_serde(stored),
    }
    rest = msgspec.json.encode(fields)[1:]  # ends with the brace
    return f'{{"key":"{served.digest.hex()}/'.encode(), b'","size_bytes":', b"," + rest
