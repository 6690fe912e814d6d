"""Every request and answer over HTTP, a msgspec Struct each: checks, OpenAPI and docs/reference/http.md come from them.

Bytes in text form are hex digits. The name of an object is NAMESPACE/HASH, 64 hex digits each, as in
docs/formats/remote-names.md: the whole key, without the salt in it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lmcache.core.limits import (
    MAX_HTTP_KEYS,
    MAX_HTTP_PAGE,
    MAX_HTTP_TOKENS,
    MAX_NAME_BYTES,
    MAX_PIN_SECONDS,
    MAX_QUOTA_GB,
)
from lmcache.http.field_types import Name, TokenIds

KEY_PATTERN = r"^[0-9a-f]{64}/[0-9a-f]{64}$"
Tier = Literal["l1", "l2", "all"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]

Key = Annotated[
    str,
    Meta(
        pattern=KEY_PATTERN,
        description="an object: NAMESPACE/HASH, 64 hex digits each",
        extra={"expected": "NAMESPACE/HASH with 64 hex digits each"},
    ),
]
Keys = Annotated[
    list[Key],
    Meta(
        min_length=1,
        max_length=MAX_HTTP_KEYS,
        description=f"names of objects, at most {MAX_HTTP_KEYS}",
        extra={"expected": f"a list of 1 to {MAX_HTTP_KEYS} names NAMESPACE/HASH with 64 hex digits each"},
    ),
]
Salt = Annotated[
    str,
    Meta(
        max_length=MAX_NAME_BYTES,
        description="the cache salt; empty: the default one",
        extra={"expected": f"a string of at most {MAX_NAME_BYTES} characters"},
    ),
]
Text = Annotated[
    str,
    Meta(
        max_length=4 * MAX_HTTP_TOKENS,
        description="the prompt as text, in place of tokens; needs --tokenizer-dir",
        extra={"expected": f"a string of at most {4 * MAX_HTTP_TOKENS} characters"},
    ),
]


Struct = msgspec.Struct


# ---- the server ------------------------------------------------------------------------------------------------------
class Health(Struct, frozen=True):
    """Whether the message loop and the storage loop answer."""

    status: Annotated[str, Meta(description='"healthy" or "unhealthy"')]
    reason: Annotated[str, Meta(description="what is wrong")] | msgspec.UnsetType = msgspec.UNSET


class Readiness(Struct, frozen=True):
    """Whether engines may connect."""

    status: Annotated[str, Meta(description='"ready" or "not ready"')]
    reason: Annotated[str, Meta(description="why not")] | msgspec.UnsetType = msgspec.UNSET


class ProtocolVersions(Struct, frozen=True):
    """The versions of the protocol that engines may speak."""

    current: int
    oldest_supported: int


class Version(Struct, frozen=True):
    """The version of this server, and of the protocol that its engines speak."""

    version: str
    protocol_version: ProtocolVersions


class Level(Struct, frozen=True):
    """The log level."""

    level: Annotated[LogLevel, Meta(description="lines of this level and above are logged")]


class LevelRequest(Struct, frozen=True):
    """The log level that is wanted."""

    level: Annotated[str, Meta(description="DEBUG, INFO, WARNING or ERROR, or `level` in the query")] = ""


class LevelQuery(Struct, frozen=True):
    """The same in the query."""

    level: str = ""


class HistoryQuery(Struct, frozen=True):
    """Which samples."""

    since: Annotated[
        int, Meta(ge=0, le=2**53 - 1, description="only samples after it; seconds since 1970-01-01 UTC")
    ] = 0


class HistorySeries(Struct, frozen=True):
    """A series of GET /metrics, without the prefix of its name. What has a model and a salt there is summed: over all,
    for each model, for each salt."""

    name: str
    labels: dict[str, str]


class History(Struct, frozen=True):
    """Samples of the metrics that the dashboard draws."""

    interval_seconds: float
    times: Annotated[list[int], Meta(description="of the samples, oldest first; seconds since 1970-01-01 UTC")]
    series: list[HistorySeries]
    samples: Annotated[
        list[list[float | None]],
        Meta(
            description="for each time a value for each series; null, or none at the end: there was no such series yet"
        ),
    ]


class ClearRequest(Struct, frozen=True):
    """What to empty."""

    tier: Annotated[Tier, Meta(description="what to empty")] = "l1"
    force: Annotated[bool, Meta(description="pinned objects, too: their pins end")] = False


class Cleared(Struct, frozen=True):
    """What was removed."""

    status: str
    ok: bool
    tier: Tier
    objects: int
    bytes: int


# ---- objects ---------------------------------------------------------------------------------------------------------
class ObjectQuery(Struct, frozen=True):
    """Which objects to list."""

    tier: Annotated[Tier, Meta(description="where to look: l1, then the adapters of l2 in their order")] = "all"
    adapter: Annotated[
        str, Meta(max_length=MAX_NAME_BYTES, description="only this adapter of l2, by its name in GET /status")
    ] = ""
    model_name: Annotated[str, Meta(max_length=MAX_NAME_BYTES, description="only objects of this model")] = ""
    key: Annotated[
        str,
        Meta(
            pattern="^[0-9a-f/]{0,129}$",
            description="only objects with this in their key: all of it, its hash, or a part",
            extra={"expected": "at most 129 hex digits and a slash"},
        ),
    ] = ""
    page_size: Annotated[
        int, Meta(ge=1, le=MAX_HTTP_PAGE, description="at most so many entries; a page may have fewer, even none")
    ] = 1000
    page_token: Annotated[
        str, Meta(max_length=64, description="`next_page_token` of the page before, with the same other parameters")
    ] = ""


class ObjectEntry(Struct, frozen=True):
    """One copy of an object."""

    key: Key
    size_bytes: Annotated[int, Meta(description="what it takes there")]
    tier: Annotated[str, Meta(description='"l1", or the name of an adapter')]
    model_name: Annotated[str, Meta(description="empty where only the namespace's digest is known")]
    rank: int
    world_size: int
    object_group: int
    layout: str
    cache_salt: str
    serde: Annotated[str, Meta(description="what encoded this copy; empty: nothing did")]


class ObjectPage(Struct, frozen=True):
    """A page of a listing."""

    entries: list[ObjectEntry]
    next_page_token: Annotated[str, Meta(description="empty: that was the last page")]


class DeleteRequest(Struct, frozen=True):
    """Which objects to delete, and where."""

    keys: Keys
    tier: Annotated[Tier, Meta(description="where from")] = "all"
    force: Annotated[bool, Meta(description="pinned objects, too; never what is being read or written")] = False


class Deleted(Struct, frozen=True):
    """What became of each key."""

    deleted: Annotated[int, Meta(description="keys of which something was there, and nothing is any more")]
    skipped: Annotated[int, Meta(description="keys that stay in a tier (read, pinned, a fault) or were not there")]
    ok: Annotated[bool, Meta(description="no object stays: whatever was skipped was not there")]


# ---- tokens ----------------------------------------------------------------------------------------------------------
class TokensRequest(Struct, frozen=True):
    """A prompt of a model that an engine has registered."""

    model_name: Annotated[Name, Meta(description="the model as the engine registered it")]
    tokens: TokenIds = []
    text: Text = ""
    cache_salt: Salt = ""
    instance_id: Annotated[
        str, Meta(max_length=MAX_NAME_BYTES, description="which engine's layout counts where several differ")
    ] = ""


class ChunkTiers(Struct, frozen=True):
    """Where a chunk is."""

    hash: Annotated[str, Meta(description="64 hex digits")]
    tiers: Annotated[list[str], Meta(description='tiers that have all of it: "l1", names of adapters')]
    in_l1: Annotated[list[int], Meta(description="positions in `namespaces` of the objects that L1 has")] = []


class PartialChunk(Struct, frozen=True):
    """Where a partial chunk is: the first tokens behind the last full one."""

    hash: Annotated[str, Meta(description="64 hex digits")]
    tiers: Annotated[list[str], Meta(description="as of a chunk")]
    in_l1: Annotated[list[int], Meta(description="as of a chunk")]
    tokens: Annotated[int, Meta(description="how many it has")]


class LookupAnswer(Struct, frozen=True):
    """Where each chunk of a prompt is. Nothing is leased, and nothing counted as a lookup."""

    chunk_tokens: int
    prefix_chunks: Annotated[int, Meta(description="chunks from the first on that some tier has")]
    chunks: list[ChunkTiers]
    namespaces: Annotated[list[str], Meta(description="of the objects of a chunk, 64 hex digits each")] = []
    partial_chunks: Annotated[
        list[PartialChunk],
        Meta(description="those behind the full chunks that a tier has, as far as is known here, the longest first"),
    ] = []


class Accepted(Struct, frozen=True):
    """A job has begun."""

    request_id: Annotated[str, Meta(description="for GET /jobs/{id}, and of a prefetch GET /cache/prefetches/{id}")]


class Job(Struct, frozen=True):
    """A job and how far it is."""

    request_id: str
    kind: Annotated[str, Meta(description='"prefetch" or "move"')]
    status: Annotated[str, Meta(description='"waiting", "running", "done" or "failed"')]
    done: Annotated[bool, Meta(description="it has ended, and nothing of it goes on")]
    objects_total: int
    objects_done: Annotated[int, Meta(description="that are where they were wanted")]
    objects_failed: int
    detail: Annotated[str, Meta(description="why not everything was done")]
    age_seconds: Annotated[float, Meta(description="since it was asked for")]


class Jobs(Struct, frozen=True):
    """Those under way and the latest that have ended, youngest first."""

    jobs: list[Job]


class MoveRequest(Struct, frozen=True):
    """Objects by their names or of a prompt, and between which tiers."""

    source: Annotated[Name, Meta(description='"l1" or the name of an adapter')] = msgspec.field(name="from")
    target: Annotated[Name, Meta(description='"l1" or the name of an adapter')] = msgspec.field(name="to")
    keys: Annotated[
        list[Key],
        Meta(
            max_length=MAX_HTTP_KEYS,
            description=f"names of objects, at most {MAX_HTTP_KEYS}",
            extra={"expected": f"a list of at most {MAX_HTTP_KEYS} names NAMESPACE/HASH with 64 hex digits each"},
        ),
    ] = []
    model_name: Annotated[str, Meta(max_length=MAX_NAME_BYTES, description="of `tokens`")] = ""
    tokens: TokenIds = []
    text: Text = ""
    cache_salt: Salt = ""
    instance_id: Annotated[str, Meta(max_length=MAX_NAME_BYTES, description="as in POST /cache/lookup")] = ""
    copy: Annotated[bool, Meta(description="leave the objects where they were, too")] = False


# ---- pins ------------------------------------------------------------------------------------------------------------
class PinRequest(Struct, frozen=True):
    """Objects that are not to be evicted."""

    keys: Keys
    owner: Annotated[Name, Meta(description="who pins: any name")]
    ttl_seconds: Annotated[
        float,
        Meta(
            gt=0,
            le=MAX_PIN_SECONDS,
            description="when the pin ends by itself",
            extra={"expected": f"a number above 0 and up to {MAX_PIN_SECONDS}"},
        ),
    ]


class Pin(Struct, frozen=True):
    """A pin. It ends by DELETE, by its time, or with the server."""

    pin_id: str
    owner: str
    objects: Annotated[int, Meta(description="keys of which something is held")]
    missing: Annotated[int, Meta(description="keys of which nothing was there")]
    remaining_seconds: float


class Pins(Struct, frozen=True):
    """All pins."""

    pins: list[Pin]
    objects: Annotated[int, Meta(description="held by all of them; one that two pins hold counts twice")]


class UnpinRequest(Struct, frozen=True):
    """Which pin to end: one by its id, or all of an owner."""

    pin_id: Annotated[str, Meta(max_length=MAX_NAME_BYTES, description="one pin")] = ""
    owner: Annotated[str, Meta(max_length=MAX_NAME_BYTES, description="all pins of this owner")] = ""


class Unpinned(Struct, frozen=True):
    """What has ended."""

    pins: int
    objects: int


# ---- quotas ----------------------------------------------------------------------------------------------------------
class QuotaRequest(Struct, frozen=True):
    """What a salt may keep."""

    limit_gb: Annotated[float, Meta(ge=0, le=MAX_QUOTA_GB, description="1 GB is 2^30 bytes")]


class Quota(Struct, frozen=True):
    """What a salt may keep, and has in L1."""

    cache_salt: Annotated[str, Meta(description="_default: the empty salt; a digest for whoever may not read salts")]
    limit_gb: float
    current_usage_gb: float
    exists: Annotated[bool, Meta(description="whether a limit was set")]


class SaltQuota(Quota, frozen=True):
    """The same, and whether limits are in force."""

    enforced: Annotated[bool, Meta(description="only --eviction-policy IsolatedLRU goes by quotas")]


class Quotas(Struct, frozen=True):
    """The quotas of all salts that have a limit or hold something."""

    quotas: list[Quota]
    enforced: Annotated[bool, Meta(description="only --eviction-policy IsolatedLRU goes by quotas")]


# ---- others ----------------------------------------------------------------------------------------------------------
JsonObject = dict[str, Any]
