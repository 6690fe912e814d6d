"""Every message, as msgspec structs packed to msgpack arrays (docs/formats/wire.md).

A call is the ZMQ frames [call id: 8 bytes little-endian][method: ascii][payload: msgpack]; its answer is
[call id][b"ok" or an ErrorCode][payload]. An error's payload is a msgpack string: one sentence.
`u32`, `u64`, hashes: packed little-endian bytes as in `_native`. New fields go to the end with a default.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from lmcache.core import limits
from lmcache.core.key import CHUNK_HASH_BYTES

PROTOCOL_VERSION = 1
OLDEST_SUPPORTED_PROTOCOL_VERSION = 1

# What a decoder lets in. A longer value is refused before anything is made of it; some are limited further by handlers.
Name = Annotated[str, Meta(max_length=limits.MAX_NAME_BYTES)]
ServerEpoch = Annotated[bytes, Meta(max_length=limits.SERVER_EPOCH_BYTES)]  # random, new with every start of a server
ProcessId = Annotated[bytes, Meta(max_length=limits.PROCESS_ID_BYTES)]  # random, new with every client
Tokens = Annotated[bytes, Meta(max_length=4 * limits.MAX_TOKENS_PER_SESSION)]  # u32
Identity = Annotated[bytes, Meta(max_length=limits.MAX_IDENTITY_BYTES)]
Hashes = Annotated[bytes, Meta(max_length=CHUNK_HASH_BYTES * limits.MAX_CHUNKS_PER_CALL)]
Slots = Annotated[bytes, Meta(max_length=8 * limits.MAX_SLOTS_PER_CALL)]  # u64
Flags = Annotated[bytes, Meta(max_length=limits.MAX_SLOTS_PER_CALL)]  # a byte a slot
FramePart = Annotated[memoryview, Meta(max_length=limits.MAX_PAYLOAD_PART_BYTES)]
# (absolute chunk index, 32 bytes): content of that chunk beside its tokens
Extra = tuple[int, Annotated[bytes, Meta(max_length=CHUNK_HASH_BYTES)]]
ExtraList = Annotated[list[Extra], Meta(max_length=limits.MAX_EXTRAS_PER_SESSION)]
PositionList = Annotated[list[int], Meta(max_length=limits.MAX_CHUNKS_PER_CALL)]
GroupList = Annotated[list[int], Meta(max_length=limits.MAX_OBJECT_GROUPS)]
LayoutList = Annotated[list[Name], Meta(max_length=limits.MAX_OBJECT_GROUPS)]
Tensor = tuple[
    Annotated[str, Meta(max_length=limits.MAX_DTYPE_CHARACTERS)],
    Annotated[list[int], Meta(max_length=limits.MAX_TENSOR_DIMENSIONS)],
]
TensorList = Annotated[list[Tensor], Meta(max_length=limits.MAX_TENSORS)]
SaltList = Annotated[list[Name], Meta(max_length=limits.MAX_SALTS_FOLLOWED)]
CursorList = Annotated[list[int], Meta(max_length=limits.MAX_INDEXES_FOLLOWED + 1)]
CountList = Annotated[list[int], Meta(max_length=16)]
AskedHashes = Annotated[bytes, Meta(max_length=CHUNK_HASH_BYTES * limits.MAX_CHUNKS_ASKED_FOR)]
Positions = Annotated[bytes, Meta(max_length=4 * limits.MAX_CHUNKS_PER_CALL)]  # u32
ModeList = Annotated[list[Name], Meta(max_length=limits.MAX_TRANSFER_MODES)]


class ErrorCode(str, enum.Enum):
    BAD_REQUEST = "bad_request"  # the message breaks a rule of the protocol
    UNKNOWN_METHOD = "unknown_method"
    UNSUPPORTED_VERSION = "unsupported_version"
    UNKNOWN_INSTANCE = "unknown_instance"  # register (again): the server may have restarted
    UNKNOWN_SESSION = (
        "unknown_session"  # the server has not (or no longer) the tokens before first_token: send them from 0
    )
    LAYOUT_CONFLICT = "layout_conflict"
    FORBIDDEN = "forbidden"  # the client's CURVE key does not allow it
    TOO_LARGE = "too_large"
    TOO_MANY = "too_many"
    CANCELLED = "cancelled"  # a later call (EndSession, another Lookup) made this answer pointless
    SHUTTING_DOWN = "shutting_down"
    INTERNAL = "internal"
    ENDED = "ended"  # the lease or reservation that is named is no more, or belongs to another server epoch


class TransferMode(str, enum.Enum):
    """How frames travel between a worker and L1."""

    SHM = "shm"  # the worker maps the memory and copies
    SOCKET = "socket"  # `write` and `read` carry them


class Message(msgspec.Struct, array_like=True):
    """Base of all payloads. Arrays on the wire: position, not name, identifies a field."""


# ---- connection ------------------------------------------------------------------------------------------------------
class Hello(Message):
    """The answer names the version that both speak from then on: the newest that both know."""

    protocol_version: int  # the newest that the client speaks
    client_version: Name = ""
    oldest_protocol_version: int = 0  # that it speaks as well; 0: `protocol_version` alone


class HelloReply(Message):
    protocol_version: int
    server_version: Name
    server_epoch: ServerEpoch
    chunk_tokens: int
    hash_algorithm: Name
    transfer_modes: ModeList  # values of TransferMode, the fastest first
    shm_path: Name
    shm_bytes: int
    lease_ttl_seconds: float
    reservation_ttl_seconds: float
    peer_address: Name = ""  # HOST:PORT where it serves other servers; "" for nowhere


class Ping(Message):
    """Also the heartbeat: with an instance id it renews that instance's leases and reservations."""

    instance_id: Name = ""
    worker_id: int = -1  # -1: the scheduler side
    process: ProcessId = b""  # that registered under this name; empty: not said
    # Since the last one, for the server's metrics: requests that a proxy was told are stored, and that it was not.
    counts: CountList = []


class PingReply(Message):
    server_epoch: ServerEpoch
    registered: bool  # False: this instance or worker must register again
    ready: bool = True  # False: the storage loop does not answer


# ---- registration ----------------------------------------------------------------------------------------------------
class RegisterInstance(Message):
    """Sent by the scheduler side. Idempotent; a change of fields is a LAYOUT_CONFLICT."""

    instance_id: Name
    model_name: Name
    kv_world_size: int  # ranks that hold distinct KV
    object_groups: int
    heartbeat_interval_seconds: float
    engine: Name = ""  # "vllm 0.32.0", for operators
    # Per object group: how many tokens before the end of a hit it must have, 0 for all of them. Empty: all of all. With
    # any other number a hit never covers the last token, which the engine computes: that needs what is before the end.
    tail_tokens: GroupList = []
    # 16 random bytes of the client that registers: they distinguish two engines with one instance id. Empty: not said.
    process: ProcessId = b""
    # How many tokens behind a chunk its KV depends on, and its name therefore covers (`beginning_identity`).
    lookahead_tokens: int = 0


class RegisterWorker(Message):
    """Sent by each worker. Registering again (restart) ends everything that its previous process held."""

    instance_id: Name
    worker_id: int  # 0..n-1, unique in the instance
    kv_rank: int
    # KVLayout.fingerprint per object group. With "~" and the name of a lossy serde behind it the engine accepts what
    # that serde leaves.
    layouts: LayoutList
    payload_bytes: GroupList  # per object group
    stores: bool = True  # False: another worker stores the same KV (tensor-parallel copies of MLA)
    heartbeat_interval_seconds: float = 10.0
    tensors: TensorList = []  # dtype and shape of a chunk's KV, for the lookup log
    transfer_mode: Name = "shm"  # a TransferMode
    transfer_reason: Name = ""  # one sentence for operators: why not "shm"
    process: ProcessId = b""  # as in RegisterInstance


class RegisterReply(Message):
    owner: int  # byte `owner` of the shared-memory file is locked by the worker while it runs (see memory/)


class Unregister(Message):
    instance_id: Name
    worker_id: int = -1
    process: ProcessId = b""  # as in Ping


# ---- lookup (scheduler side) -----------------------------------------------------------------------------------------
class Source(Message):
    """The engine that computed the beginning of a request, as that engine's answer names itself (prefill and decode
    apart). What it is still storing is waited for."""

    instance_id: Name
    peer_address: Name  # of its server, as in HelloReply
    server_epoch: ServerEpoch  # of its server
    tokens: int  # from the beginning on, whose KV it has stored or is storing
    wait_seconds: float = 0.0


class Lookup(Message):
    """Appends tokens to the request's session and asks for the longest prefix. Answered when the answer is final: at
    once when L1 decides, after the L2 loads or their deadline otherwise. Any lease that an earlier lookup of this
    request holds is released first. The session lasts until EndSession."""

    instance_id: Name
    request_id: Name
    cache_salt: Name
    first_token: int  # position of tokens[0]; everything before was sent already
    tokens: Tokens  # u32
    identity: Identity = b""  # "" or bytes that seed the first chunk's parent (LoRA name ...)
    extras: ExtraList = []  # multimodal content of chunks
    deadline_seconds: float = 30.0
    recompute: bool = False  # the engine computes sooner than L2 answers: L1 alone decides, and the miss is named so
    resumed: bool = False  # it ran before and was preempted: what it stored itself is no hit, and nothing is counted
    trace_parent: Name = ""  # W3C Trace Context: the `traceparent` that the request came with
    source: Source | None = None
    # Above 0: the first so many tokens behind the last full chunk are looked up behind it, as a partial chunk.
    partial_tokens: int = 0


class LookupReply(Message):
    """`chunks` hit, leased. hashes: 32 bytes for every full chunk of the session (the workers store by them).
    slots: u64 [rank][group][hit chunk], offsets in shared memory; NO_SLOT before the tail of a group."""

    chunks: int
    chunks_l1: int  # of these, how many L1 had
    lease: int
    hashes: Hashes
    slots: Slots
    miss_reason: Name = ""  # MissReason value for what lies beyond the hit, "" when all that was named hit
    # Above 0: the last of `hashes` names the partial chunk that was asked for, of so many tokens. A hit of as many
    # chunks as there are hashes has it.
    partial_tokens: int = 0


class Release(Message):
    """Gives a lease back. Idempotent. Chunks whose frames did not verify while they were copied are removed from L1."""

    instance_id: Name
    lease: int
    unreadable_chunks: PositionList = []  # positions in the lease, 0..chunks-1
    recomputed: bool = False  # left out because computing is expected to be faster
    loaded_tokens: int = 0  # at the end of the hit, that the engine loaded: it had those before them itself
    prefill_seconds: float = 0.0  # that computing them takes at this engine's measured speed; 0: not known


class EndSession(Message):
    """The request is over: forgets its tokens and releases its leases. Idempotent."""

    instance_id: Name
    request_id: Name


# ---- objects that the engine names itself (worker side) --------------------------------------------------------------
class LookupKeys(Message):
    """As Lookup, for objects that the engine names by hashes of its own, of this worker's rank alone. Nothing is hashed
    and no tokens are kept; the request lasts until EndSession, and Release and Read take its lease as any other."""

    instance_id: Name
    worker_id: int
    request_id: Name
    cache_salt: Name
    hashes: Hashes
    deadline_seconds: float = 30.0


class ProbeKeys(Message):
    """Which objects of this worker's rank there are. Takes nothing, loads nothing. Answered at once where L1 has all,
    else when every adapter has said what it has, or the deadline has passed."""

    instance_id: Name
    worker_id: int
    cache_salt: Name
    hashes: Hashes
    deadline_seconds: float = 5.0
    object_tokens: int = 0  # counted as a lookup of that many tokens an object; 0: not counted


class ProbeKeysReply(Message):
    tiers: Flags  # a byte for each [group][hash]: 0 it is nowhere, 1 in L1, 2 in L2


# ---- store (worker side) ---------------------------------------------------------------------------------------------
class Reserve(Message):
    """Slots for the n chunks that `hashes` names, of this worker's rank, all groups. The scheduler side gets the hashes
    with LookupReply or AppendReply and hands them to the workers. The worker writes whole frames."""

    instance_id: Name
    worker_id: int
    cache_salt: Name
    hashes: Hashes
    wanted: Flags = b""  # one byte per [group][chunk], 0: no slot is wanted; empty: everywhere
    request_id: Name = ""  # whose chunks these are, for its trace


class ReserveReply(Message):
    reservation: int
    slots: Slots  # u64 [group][chunk]; NO_SLOT: do not write
    chunks_without_room: int


class Commit(Message):
    """`written`: one byte per [group][chunk], 1 publish, 0 abort; empty: publish all."""

    instance_id: Name
    worker_id: int
    reservation: int
    written: Flags = b""


class CommitReply(Message):
    committed: int  # objects made resident by this call


class Append(Message):
    """Adds tokens to a session without looking anything up; returns the hashes of the chunks that became full."""

    instance_id: Name
    request_id: Name
    cache_salt: Name
    first_token: int
    tokens: Tokens
    identity: Identity = b""
    extras: ExtraList = []
    partial_tokens: int = 0  # above 0: the first so many tokens behind the last full chunk are named, too


class AppendReply(Message):
    first_chunk: int
    hashes: Hashes
    partial_tokens: int = 0  # as in LookupReply


# ---- changes, for the KV events of routers (scheduler side) ----------------------------------------------------------
class ChunkChanges(Message):
    """Asks which chunks have changed, and where each of them and of the chunks that are named here is now: of this
    instance's own namespaces, and of salts that it uses. Answered at once.

    A chunk that has changed is reported as it is when the call is answered, not as it was in between: what happens
    later is reported by the next call. So a client that goes from cursor to cursor ends up with what is there."""

    instance_id: Name
    server_epoch: ServerEpoch  # of the server that gave the cursor
    cursor: CursorList  # as it was answered last; empty: begins
    salts: SaltList
    asked_salts: Positions = b""  # of each chunk that is named: the position of its salt in `salts`
    asked_hashes: AskedHashes = b""
    shared_l2: bool = False  # what adapters hold that other servers read as well counts, too
    # Since the last call, for the server's metrics: chunks announced to routers and taken back, changes of chunks that
    # this engine does not know, chunks that it had no room to remember.
    counts: CountList = []


class ChunkChangesReply(Message):
    """`lost`: the cursor was of another server, or too old, or the registrations have changed since: the client asks
    for all the chunks that it follows, from the cursor of this answer on. `more`: there are further changes already.
    `unused_salts`: positions of salts that this instance has not used, or not since a registration changed."""

    cursor: CursorList
    lost: bool
    more: bool
    unused_salts: PositionList
    salts: Positions  # of each chunk below
    hashes: Hashes
    tiers: Flags  # a byte each: 1 all of it is in L1, 2 all of it is in one adapter of L2, 3 both, 0 neither


# ---- payload over the socket (workers registered with transfer_mode "socket") ----------------------------------------
class Write(Message):
    """The next bytes of the frame that a reservation has a slot for: parts of one frame come in order, without a gap.

    Only frames that arrived whole and verify are published by the commit."""

    instance_id: Name
    worker_id: int
    server_epoch: ServerEpoch
    reservation: int
    group: int
    chunk: int  # of the reservation
    offset: int  # in the frame
    data: FramePart  # 1..MAX_PAYLOAD_PART_BYTES; a view of the message, never a copy


class WriteReply(Message):
    received_bytes: int  # of the frame; sent when they are in L1


class Read(Message):
    """Bytes of one frame of a lease, of the worker's rank."""

    instance_id: Name
    worker_id: int
    server_epoch: ServerEpoch
    lease: int
    group: int
    chunk: int  # of the lease
    offset: int  # in the frame
    size_bytes: int  # 1..MAX_PAYLOAD_PART_BYTES


class ReadReply(Message):
    data: FramePart


# ---- administration --------------------------------------------------------------------------------------------------
class Clear(Message):
    tier: Name = "all"  # l1, l2, all


class ClearReply(Message):
    objects: int
    bytes: int


class Empty(Message):
    """The answer of calls that return nothing; also the payload of Noop."""


METHODS: dict[str, tuple[type[Message], type[Message]]] = {
    "hello": (Hello, HelloReply),
    "ping": (Ping, PingReply),
    "noop": (Empty, Empty),
    "register_instance": (RegisterInstance, RegisterReply),
    "register_worker": (RegisterWorker, RegisterReply),
    "unregister": (Unregister, Empty),
    "lookup": (Lookup, LookupReply),
    "append": (Append, AppendReply),
    "lookup_keys": (LookupKeys, LookupReply),
    "probe_keys": (ProbeKeys, ProbeKeysReply),
    "release": (Release, Empty),
    "end_session": (EndSession, Empty),
    "chunk_changes": (ChunkChanges, ChunkChangesReply),
    "reserve": (Reserve, ReserveReply),
    "commit": (Commit, CommitReply),
    "write": (Write, WriteReply),
    "read": (Read, ReadReply),
    "clear": (Clear, ClearReply),
}
