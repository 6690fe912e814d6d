"""What servers tell a coordinator, and what it answers: the Structs of its HTTP interface.

Fields behind a comment that says so are additions: servers and coordinators of others leave them out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lmcache.core.address import INSTANCE_ID_PATTERN, REACHED_HOST_PATTERN
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.core.limits import (
    MAX_FLEET_COPIES_ASKED,
    MAX_FLEET_COPIES_SHOWN,
    MAX_FLEET_EVENT_ENTRIES,
    MAX_HTTP_KEYS,
    MAX_HTTP_PAGE,
    MAX_NAME_BYTES,
    MAX_PIN_SECONDS,
    MAX_QUOTA_GB,
    MAX_WORLD_SIZE,
)
from lmcache.http.field_types import Name, TokenIds

Struct = msgspec.Struct

EventType = Literal["store", "delete", "access", "config"]
Tier = Literal["l1", "l2"]
ResyncMark = Literal["", "begin", "end"]

SIZE_BYTES = 8  # of a number in a column

_MOST = 2**63 - 1
Number = Annotated[int, Meta(ge=0, le=_MOST)]
Bytes = Annotated[int, Meta(ge=0, le=2**50)]
Text = Annotated[str, Meta(max_length=MAX_NAME_BYTES, extra={"expected": f"at most {MAX_NAME_BYTES} characters"})]
InstanceName = Annotated[
    str,
    Meta(
        pattern=INSTANCE_ID_PATTERN,
        extra={"expected": f"at most {MAX_NAME_BYTES} characters without slashes and spaces"},
    ),
]
Address = Annotated[
    str,
    Meta(
        pattern=REACHED_HOST_PATTERN,
        extra={"expected": "a host name or an address, without a port"},
    ),
]
Port = Annotated[int, Meta(ge=0, le=65535)]
Hex = Annotated[
    str, Meta(pattern=r"^(0x)?[0-9a-fA-F]{64}\Z", description="64 hex digits", extra={"expected": "64 hex digits"})
]
NamespaceHex = Annotated[
    str,
    Meta(
        pattern=r"^([0-9a-f]{64})?\Z",
        description="digest of the whole namespace, 64 hex digits; empty: not told",
        extra={"expected": "64 hex digits, or empty"},
    ),
]


class Key(Struct, frozen=True):
    """An object: a chunk of a model's rank and object group, for a salt."""

    chunk_hash_hex: Hex
    model_name: Text
    kv_rank: Annotated[int, Meta(ge=0, le=MAX_WORLD_SIZE)]
    object_group_id: Annotated[int, Meta(ge=0, le=65535)] = 0
    cache_salt: Text = ""
    namespace: NamespaceHex = ""  # an addition


Keys = Annotated[
    list[Key],
    Meta(max_length=MAX_HTTP_KEYS, description=f"objects, at most {MAX_HTTP_KEYS}"),
]


# ---- instances -------------------------------------------------------------------------------------------------------
class RegisterRequest(Struct, frozen=True):
    """A server that joins."""

    ip: Annotated[Address, Meta(description="where its HTTP listener is reached")]
    http_port: Port
    instance_id: Annotated[InstanceName, Meta(description="empty: the coordinator gives one")] = ""
    metadata: Annotated[dict[str, Any], Meta(description="whatever it tells of itself")] = {}
    p2p_advertised_url: Annotated[Text, Meta(description="where other servers load from it; empty: nowhere")] = ""
    mq_port: Annotated[Port, Meta(description="where engines connect")] = 0


class Registered(Struct, frozen=True):
    """A server has joined."""

    instance_id: str
    re_registered: Annotated[bool, Meta(description="one of that name was there")]
    incarnation: Annotated[int, Meta(description="the highest that is known of it: it goes on above")] = (
        0  # an addition
    )
    event_transport: Annotated[str, Meta(description="by what events reach the coordinator beside HTTP (+)")] = "http"


class HeartbeatAnswer(Struct, frozen=True):
    """The server is known."""

    status: str
    members: Annotated[int, Meta(description="another number than before: GET /instances has others")] = 0
    incarnation: Annotated[int, Meta(description="the highest that is known of the server (+)")] = 0
    needs_resync: Annotated[
        bool, Meta(description="batches of that incarnation are missing: everything is to be told again (+)")
    ] = False
    seq: Annotated[int, Meta(description="of that incarnation's last batch that was taken (+)")] = 0
    log_requests: Annotated[
        int, Meta(description="that the server may have in the log beyond that one; 0: no log is read (+)")
    ] = 0


class ResyncTurn(Struct, frozen=True):
    """When a server tells everything: a coordinator takes so much of a few servers at a time."""

    wait_seconds: Annotated[float, Meta(description="0: now; else it is to ask again after that")]


class InstanceEntry(Struct, frozen=True):
    """A server of the fleet."""

    instance_id: str
    ip: str
    http_port: int
    metadata: dict[str, Any]
    p2p_advertised_url: str
    mq_port: int
    age_seconds: Annotated[float, Meta(description="since it joined")]
    silent_seconds: Annotated[float, Meta(description="since its last heartbeat")]
    incarnation: int
    seq: Annotated[int, Meta(description="of the last batch of events")]
    needs_resync: Annotated[bool, Meta(description="events of it are missing: it is to tell everything again")]


class InstancesQuery(Struct, frozen=True):
    """What to tell of each server."""

    detail: Annotated[Literal["full", "brief"], Meta(description="brief: without its metadata")] = "full"  # an addition


class Instances(Struct, frozen=True):
    """The servers of the fleet."""

    instances: list[InstanceEntry]
    members: int = 0


class Usage(Struct, frozen=True):
    """What a server has on a tier."""

    tier: str
    backend: str
    shared: bool
    objects: int
    used_bytes: int
    capacity_bytes: Annotated[int, Meta(description="0: not told")]
    ratio: Annotated[float, Meta(description="used over capacity; 0 where that is not told")]


class InstanceUsage(Struct, frozen=True):
    """What a server has."""

    instance_id: str
    usage: list[Usage]


class FleetUsage(Struct, frozen=True):
    """What all servers have."""

    instances: list[InstanceUsage]


# ---- events and directory --------------------------------------------------------------------------------------------
class Entry(Struct, frozen=True):
    """An object of a batch."""

    key: Key
    size_bytes: Bytes = 0


class Objects(Struct, frozen=True):
    """Objects of one model, rank, object group and salt, as columns of one length."""

    model_name: Text
    kv_rank: Annotated[int, Meta(ge=0, le=MAX_WORLD_SIZE)]
    object_group_id: Annotated[int, Meta(ge=0, le=65535)]
    cache_salt: Text
    hashes: Annotated[
        bytes, Meta(max_length=CHUNK_HASH_BYTES * MAX_FLEET_EVENT_ENTRIES, description="32 bytes of each")
    ]
    sizes_bytes: Annotated[
        bytes,
        Meta(
            max_length=SIZE_BYTES * MAX_FLEET_EVENT_ENTRIES,
            description="8 bytes of each, little-endian; empty: not told",
        ),
    ] = b""

    def __len__(self) -> int:
        return len(self.hashes) // CHUNK_HASH_BYTES

    @property
    def fits(self) -> bool:
        """Whether the columns are whole and of one length."""
        return not len(self.hashes) % CHUNK_HASH_BYTES and len(self.sizes_bytes) in (0, SIZE_BYTES * len(self))


class Batch(Struct, frozen=True):
    """Changes of one tier of a server, in their order."""

    instance_id: Name
    incarnation: Number
    seq: Annotated[int, Meta(ge=1, le=_MOST)]
    event_type: EventType
    tier: Tier
    backend: Text = ""
    entries: Annotated[list[Entry], Meta(max_length=MAX_FLEET_EVENT_ENTRIES)] = []
    shared: bool = False
    ts: float = 0.0
    capacity_bytes: Number = 0
    # additions
    namespace: NamespaceHex = ""  # of the entries whose key has none
    world_size: Annotated[int, Meta(ge=0, le=MAX_WORLD_SIZE)] = 0  # of that namespace; 0: not told
    resync: ResyncMark = ""  # everything is told again from here on; everything has been told
    objects: Objects | None = None  # in place of entries, or beside them

    @property
    def object_count(self) -> int:
        return len(self.entries) + len(self.objects or ())


class EventsRequest(Struct, frozen=True):
    """Batches, which are applied in their order."""

    batches: Annotated[list[Batch], Meta(max_length=MAX_FLEET_EVENT_ENTRIES)]


class EventsAnswer(Struct, frozen=True):
    """What became of the batches."""

    applied: int
    duplicates: Annotated[int, Meta(description="had come before")]
    stale: Annotated[int, Meta(description="of an earlier incarnation, or of a server that has not joined")]
    resync: Annotated[
        list[str], Meta(description="servers that are to raise their incarnation and tell everything")
    ] = []
    incarnations: Annotated[dict[str, int], Meta(description="the highest known, of servers with stale batches")] = {}
    packed: Annotated[bool, Meta(description="msgpack is taken, and batches with `objects`")] = False  # an addition


class LookupRequest(Struct, frozen=True):
    """Either keys, or a prompt."""

    keys: Keys = []
    token_ids: TokenIds = []
    model_name: Text = ""
    world_size: Annotated[int, Meta(ge=1, le=MAX_WORLD_SIZE)] = 1
    cache_salt: Text = ""
    copies: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_FLEET_COPIES_ASKED,
            description=f"of each object, at most {MAX_FLEET_COPIES_ASKED} of all together",
        ),
    ] = MAX_FLEET_COPIES_SHOWN  # an addition


class Placement(Struct, frozen=True):
    """Where a copy is."""

    instance_id: str
    incarnation: int
    tier: str
    backend: str
    size_bytes: int
    shared: bool


class LookupResult(Struct, frozen=True):
    """Where an object is."""

    key: Key
    placements: list[Placement]
    access_count: int
    complete: Annotated[
        bool, Meta(description="false: it has more copies than were asked for, and others were not looked at")
    ] = True  # an addition


class PartialResult(Struct, frozen=True):
    """Where a partial chunk is: the first tokens behind the last full one."""

    tokens: Annotated[int, Meta(description="how many it has")]
    results: Annotated[list[LookupResult], Meta(description="of each rank")]


class LookupAnswer(Struct, frozen=True):
    """In the order of the keys; of a prompt, chunk by chunk, each with its ranks."""

    chunks: int
    results: list[LookupResult]
    chunk_tokens: int = 0  # an addition
    partial_chunks: Annotated[
        list[PartialResult], Meta(description="those behind the full chunks that a server has, the longest first")
    ] = []  # an addition


class KeysQuery(Struct, frozen=True):
    """Which copies to list."""

    tier: Annotated[Literal["", "l1", "l2"], Meta(description="empty: both")] = ""
    instance_id: Text = ""
    backend: Text = ""
    offset: Annotated[int, Meta(ge=0, le=2**32 - 1, description="`next_offset` of the page before")] = 0
    limit: Annotated[int, Meta(ge=1, le=MAX_HTTP_PAGE)] = 1000


class KeyEntry(Struct, frozen=True):
    """A copy."""

    key: Key
    placement: Placement


class KeysAnswer(Struct, frozen=True):
    """A page of copies; it may have fewer than asked for, even none."""

    keys: list[KeyEntry]
    next_offset: Annotated[int, Meta(description="0: that was the last page")]


class DirectoryStats(Struct, frozen=True):
    """How much the directory knows."""

    keys: int
    placements: int
    forgotten_placements: Annotated[int, Meta(description="whose memory is not free yet")]
    scopes: Annotated[int, Meta(description="model, rank, object group, salt and namespace")]
    instances: int
    memory_bytes: int
    batches_applied: int
    batches_duplicate: int
    batches_stale: int
    gaps: int
    resyncs: int


# ---- cache -----------------------------------------------------------------------------------------------------------
class PromptRequest(Struct, frozen=True):
    """A prompt to be loaded by a server."""

    instance_id: Name
    model_name: Name
    token_ids: TokenIds
    world_size: Annotated[int, Meta(ge=1, le=MAX_WORLD_SIZE)] = 1
    cache_salt: Text = ""


class Started(Struct, frozen=True):
    """Work has begun."""

    request_id: str
    chunks: int
    status: str


class JobStatus(Struct, frozen=True):
    """Work and how far it is."""

    request_id: str
    kind: str
    status: Annotated[str, Meta(description='"waiting", "running", "done" or "failed"')]
    done: bool
    objects_total: int
    objects_done: int
    objects_failed: int
    detail: str
    age_seconds: float


class JobList(Struct, frozen=True):
    """Youngest first."""

    jobs: list[JobStatus]


class PinRequest(Struct, frozen=True):
    """Objects that no server is to evict: keys, or a prompt."""

    keys: Keys = []
    token_ids: TokenIds = []
    model_name: Text = ""
    world_size: Annotated[int, Meta(ge=1, le=MAX_WORLD_SIZE)] = 1
    cache_salt: Text = ""
    instance_id: Annotated[Text, Meta(description="only this server; empty: every one that has a copy")] = ""
    owner: Annotated[Name, Meta(description="who pins: any name")] = "fleet"
    ttl_seconds: Annotated[
        float, Meta(gt=0, le=MAX_PIN_SECONDS, extra={"expected": f"a number above 0 and up to {MAX_PIN_SECONDS}"})
    ] = float(MAX_PIN_SECONDS)


class PinEntry(Struct, frozen=True):
    """A pin of the fleet."""

    pin_id: str
    owner: str
    objects: Annotated[int, Meta(description="copies that servers hold")]
    missing: Annotated[int, Meta(description="objects of which no server has a copy that it holds")]
    instances: Annotated[list[str], Meta(description="that hold some")]
    failed: Annotated[dict[str, str], Meta(description="servers that could not be asked, and why")]
    remaining_seconds: float


class PinList(Struct, frozen=True):
    pins: list[PinEntry]


class UnpinRequest(Struct, frozen=True):
    """One by its id, or all of an owner."""

    pin_id: Text = ""
    owner: Text = ""


class Unpinned(Struct, frozen=True):
    """What has ended."""

    pins: int
    objects: Annotated[int, Meta(description="copies that they held")]
    behind: Annotated[
        list[str], Meta(description="servers that could not be asked: they hold their copies until they answer")
    ] = []


class DeleteRequest(Struct, frozen=True):
    """Objects that are to go: keys, or a prompt."""

    keys: Keys = []
    token_ids: TokenIds = []
    model_name: Text = ""
    world_size: Annotated[int, Meta(ge=1, le=MAX_WORLD_SIZE)] = 1
    cache_salt: Text = ""
    instance_id: Annotated[Text, Meta(description="only there; empty: from every server")] = ""
    tier: Literal["l1", "l2", "all"] = "all"
    force: bool = False


class DeleteAnswer(Struct, frozen=True):
    """What became of the copies, over all servers."""

    deleted: int
    skipped: int
    unnamed: Annotated[int, Meta(description="objects whose server does not tell namespaces, and cannot be asked")]
    failed: Annotated[dict[str, str], Meta(description="servers that could not be asked, and why")]


class MoveRequest(Struct, frozen=True):
    """A prompt that is to be on another server."""

    source: Name
    target: Name
    model_name: Name
    token_ids: TokenIds
    world_size: Annotated[int, Meta(ge=1, le=MAX_WORLD_SIZE)] = 1
    cache_salt: Text = ""
    copy: Annotated[bool, Meta(description="leave it at the source, too")] = False


# ---- quotas ----------------------------------------------------------------------------------------------------------
class QuotaRequest(Struct, frozen=True):
    """What a salt may keep on each server."""

    limit_gb: Annotated[float, Meta(ge=0, le=MAX_QUOTA_GB, description="1 GB is 2^30 bytes")]


class QuotaEntry(Struct, frozen=True):
    """What a salt may keep, and has."""

    cache_salt: str
    limit_gb: float
    current_usage_gb: Annotated[float, Meta(description="over all servers and tiers")]
    exists: bool
    behind: Annotated[list[str], Meta(description="servers that have not taken it yet")] = []


class QuotaConfig(Struct, frozen=True):
    """How quotas are kept."""

    enforced_by: str


class QuotaList(Struct, frozen=True):
    quotas: list[QuotaEntry]


class Status(Struct, frozen=True):
    status: str
