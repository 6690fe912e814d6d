"""The native core. Every batch call takes packed little-endian buffers (bytes, bytearray, memoryview) and releases the GIL.

u32/i64/u64 below are the element types inside such a buffer; `hashes` is n x 32 bytes. `NO_SLOT` marks an absent offset.
Bad arguments raise ValueError with a sentence. Methods are thread-safe unless they say otherwise.
"""

from array import array
from collections.abc import Iterator, Sequence
from mmap import mmap
from typing import Any, Final, TypeAlias

from lmcache._native_serde import *
from lmcache.core.key import Namespace, ObjectKey

Buffer: TypeAlias = bytes | bytearray | memoryview | array[Any] | mmap
NO_SLOT: Final[int]  # 2**64 - 1
FRAME_HEADER_BYTES: Final[int]  # 4096
LARGE_PAGE_BYTES: Final[int]  # 2 MiB

# ---- machine -------------------------------------------------------------------------------------------------------
def cpu_features() -> dict[str, bool]:
    """Keys: avx2, avx512f, avx512bw, vpclmulqdq, sse42, neon, arm_crc32. The paths chosen at run time depend on them."""

def copy_path() -> str:
    """Name of the chosen path: "clmul", "avx512", "avx2", "neon" or "portable"."""

def prefault(address: int, size_bytes: int, threads: int, large_pages: bool = False) -> None:
    """Touches every page for writing (MADV_POPULATE_WRITE, else by hand) without changing content. OSError on failure.

    `large_pages`: has the kernel make large ones before, where it can (MADV_COLLAPSE). They are charged to the caller.
    """

def take_large_pages(address: int, size_bytes: int, threads: int) -> None:
    """Has the kernel put large pages there, as far as it can; never a signal where it cannot."""

def buffer_address(buffer: Buffer) -> int: ...

# ---- hashing -------------------------------------------------------------------------------------------------------
def blake3(data: Buffer) -> bytes: ...
def hash_chunks(tokens: Buffer, chunk_tokens: int, parent: bytes, extras: Buffer = b"") -> bytes:
    """Chunk hashes of every full chunk in `tokens` (u32).

    digest_i = blake3(tokens of chunk i); hash_i = blake3(hash_{i-1} || digest_i || extra_i), hash_{-1} = `parent` (32 bytes).
    `extras` is empty or 32 bytes a full chunk; an all-zero extra is left out of the input. A tail shorter than a chunk is
    ignored. Returns 32 bytes a chunk.
    """

def cbor_numbers(numbers: Buffer) -> bytes:
    """CBOR of each number (u32), one after the other, in the shortest form; without the head of an array. Keeps the GIL:
    it is called a chunk at a time."""

# ---- frame ---------------------------------------------------------------------------------------------------------
def frame_template(namespace: bytes, namespace_digest: bytes, payload_bytes: int, serde: str = "", serde_params: bytes = b"") -> bytes:
    """A 4096-byte header, complete but for chunk hash, payload checksum and header checksum."""

def frame_seal(frame_address: int, template: bytes, chunk_hash: bytes) -> None:
    """Computes the checksum of the payload that already lies behind the header and writes the header (no GIL)."""

def verify_frames(frames: list[memoryview], namespace_digests: Buffer, hashes: Buffer) -> list[str]:
    """For each frame "" if header and payload are what its key says (32 + 32 bytes each), else the reason: "magic",
    "version", "header checksum", "namespace", "chunk hash", "length", "payload checksum". A frame may be shorter than its
    buffer."""

def frame_parse(header: Buffer) -> dict[str, object]:
    """Fields of a header whose own checksum holds, else ValueError: version, payload_bytes, namespace (bytes),
    namespace_digest, chunk_hash, serde, serde_params, payload_checksum."""

def payload_checksum(data: Buffer) -> bytes:
    """16 bytes: four CRC-32C over interleaved 8-byte words (docs/formats/frame.md)."""

def frame_write_part(frame_address: int, offset: int, part: Buffer) -> None:
    """Copies a part of a frame to its place (no GIL). The part at offset 0 first makes the memory no frame. The caller
    answers for the range."""

def frame_read_part(
    frame_address: int, available_bytes: int, offset: int, part: Buffer, namespace_digest: bytes, chunk_hash: bytes
) -> str:
    """Fills the writable `part` from `offset` of the frame (no GIL). "" if the header that the key names was there before
    and after, else the reason as `verify_frames` has it; then `part` holds garbage. The payload is not checked."""

def copy_with_checksum(destination: int, source: int, size_bytes: int) -> bytes:
    """One streaming copy with the checksum fused in, on the calling thread. For benchmarks and tests."""

def copy_plain(destination: int, source: int, size_bytes: int, path: str = "") -> None:
    """One copy on the calling thread by `path` ("memcpy", "stream" or "" for the best). For benchmarks."""

# ---- GPUs (engine side) ---------------------------------------------------------------------------------------------
class CudaFence:
    """The end of what the engine had launched on a stream when this was made."""

    def wait(self) -> None:
        """RuntimeError when the device fails."""

class CudaDevice:
    """One GPU, by NVIDIA's driver API from `library`, in the context that the engine uses. RuntimeError says in a
    sentence what the driver refuses. Thread-safe."""

    def __init__(self, library: str, ordinal: int) -> None: ...
    def register_memory(self, address: int, size_bytes: int) -> None:
        """Pins memory that is present; pieces must not overlap."""
    def unregister_memory(self, address: int, size_bytes: int) -> None:
        """All pieces that begin in the range."""
    def fence(self, stream: int) -> CudaFence: ...
    def take_failure(self) -> str:
        """Why the last copy failed, once; "" if none has since."""

class CudaCopyMethods:
    """The methods of copying many pieces of `run_bytes`, tried on `trial_bytes` of the device's memory and as much of the
    host's, given back afterwards. RuntimeError when none copies right."""

    def __init__(self, device: CudaDevice, run_bytes: int, trial_bytes: int) -> None: ...
    @property
    def best(self) -> str:
        """"single", "batch" or "kernel"."""
    @property
    def one_copy_gb_per_second(self) -> float:
        """To host memory, in one piece: the limit."""
    @property
    def trials(self) -> list[tuple[str, float, float]]:
        """(method, GB/s to the host, GB/s to the device), 0 for one that failed."""

# ---- paged copies (engine side) ------------------------------------------------------------------------------------
class PagedCopier:
    """Copies between an engine's paged KV tensors and L1 slots on its own threads.

    A group is described once. A `segment` is (base address, block stride in bytes, run bytes, dims) where dims is a
    tuple of (count, stride in bytes) for the outer non-contiguous dimensions of one block; a block's content is its runs
    in that order. Payload order: segments in order, for each the blocks of the chunk in order.
    """

    def __init__(
        self, arena_address: int, arena_bytes: int, threads: int, cuda: CudaCopyMethods | None = None
    ) -> None:
        """`cuda`: the tensors lie in that device's memory. RuntimeError when it refuses streams."""
    def add_group(
        self, segments: Sequence[tuple[int, int, int, tuple[tuple[int, int], ...]]], blocks_per_chunk: int, num_blocks: int
    ) -> int:
        """Returns the group's number. `num_blocks` bounds block ids; an id outside is a ValueError at submit."""
    def payload_bytes(self, group: int) -> int: ...
    def submit_store(self, group: int, slots: Buffer, blocks: Buffer, hashes: Buffer, template: bytes) -> int:
        """Gathers n chunks into n slots (u64 offsets in the arena) and seals their headers. `blocks` is i64,
        n x blocks_per_chunk, all >= 0, and computed. Slots that are NO_SLOT are skipped. Returns a job number."""
    def submit_load(
        self,
        group: int,
        slots: Buffer,
        blocks: Buffer,
        hashes: Buffer,
        namespace_digest: bytes,
        fence: CudaFence | None = None,
    ) -> int:
        """Scatters n chunks from slots into blocks, verifying header and checksum on the way. A block id of -1 is
        verified but not written. A chunk whose frame does not verify is reported failed (its blocks hold garbage). No block is
        written before `fence`. Loads go before stores."""
    def wait(self, job: int, timeout_seconds: float) -> bytes | None:
        """One byte a chunk, or None when the job still runs. 1 = copied and verified, 0 = not, 2 = a load that the
        device failed to write: nothing is known of its frame. A finished job is forgotten."""
    def close(self) -> None:
        """Waits for running copies, then stops the threads. Idempotent."""

# ---- L1: frames of the previous server -----------------------------------------------------------------------------
class RecoveredNamespace:
    """As in the headers. The caller checks that the digest is that of `encoded`."""

    @property
    def digest(self) -> bytes: ...
    @property
    def encoded(self) -> bytes: ...

class RecoveredFrames:
    """Frames whose header verifies, found by a slot table. len() counts them; payloads have not been read."""

    @property
    def namespaces(self) -> list[RecoveredNamespace]: ...
    @property
    def owners(self) -> list[int]:
        """Who was writing into a slot that was not committed."""
    def __len__(self) -> int: ...

def recover_frames(slot_table: int, arena: int, committed_bytes: int, align_bytes: int, threads: int) -> RecoveredFrames:
    """Reads the slot table at that address (no GIL). `arena`: address of the first slot."""

class QuarantinedOwner:
    """An owner that may still write, and the quarantined reservation that holds its slots."""

    @property
    def owner(self) -> int: ...
    @property
    def reservation(self) -> int: ...

class Recovered:
    @property
    def objects(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def refused(self) -> int:
        """Words of the table that describe no slot, and frames whose header or namespace is wrong."""
    @property
    def quarantined(self) -> list[QuarantinedOwner]: ...
    @property
    def quarantined_bytes(self) -> int: ...

# ---- L1: what its calls return -------------------------------------------------------------------------------------
class Acquired:
    """`lease` is 0 when nothing was there. `slots`: u64 offsets in the arena, [namespace][chunk]; made anew by each access."""

    @property
    def lease(self) -> int: ...
    @property
    def chunks(self) -> int: ...
    @property
    def slots(self) -> bytes: ...

class Reserved:
    """`reservation` is 0 when no slot was handed out. `slots` as in Acquired."""

    @property
    def reservation(self) -> int: ...
    @property
    def slots(self) -> bytes: ...
    @property
    def chunks_without_room(self) -> int: ...

class CommitRecord:
    """An object made resident. `namespace` and `chunk` are indexes into those of the reservation."""

    @property
    def namespace(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...

class Committed:
    @property
    def objects(self) -> int: ...
    @property
    def lease(self) -> int: ...
    @property
    def records(self) -> list[CommitRecord]:
        """One for each of `objects`, in chunk order; made anew by each access."""

class EndedClaims:
    @property
    def leases(self) -> int: ...
    @property
    def reservations(self) -> int: ...

class Removed:
    @property
    def objects(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...

class Overuse:
    @property
    def salt(self) -> str: ...
    @property
    def limit_bytes(self) -> int: ...

class Ages:
    """In seconds: store to eviction, last use to eviction, between uses."""

    @property
    def lifetimes(self) -> list[float]: ...
    @property
    def idle_before_eviction(self) -> list[float]: ...
    @property
    def reuse_gaps(self) -> list[float]: ...

class ListedObject:
    @property
    def namespace_digest(self) -> bytes: ...
    @property
    def chunk_hash(self) -> bytes: ...
    @property
    def size_bytes(self) -> int: ...

class ObjectPage:
    """Objects in index order. `next_start`: where the next page starts, 0 after the last one."""

    @property
    def next_start(self) -> int: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[ListedObject]: ...
    def __getitem__(self, index: int) -> ListedObject: ...

def usable_prefix(present: Buffer, tails: Buffer) -> int:
    """Chunks of the longest prefix that can be used. `present`: one byte for each [chunk][namespace]; `tails`: u32 per
    namespace as in L1Core.acquire. What lies before the first chunk counts as there."""

# ---- L1: arena, index, leases --------------------------------------------------------------------------------------
class L1Core:
    """Allocator, index, leases and reservations over one arena. Time is passed in. Slots are offsets from the arena start.
    `namespaces` are packed digests, 32 bytes each; nothing is kept of one without objects.

    Object states: absent -> staged(owner) -> resident(readers) -> absent. Owners are small integers chosen by the caller.
    """

    def __init__(self, capacity_bytes: int, first_offset: int, align_bytes: int, policy: str, *, slot_table: int = 0) -> None:
        """policy: "LRU", "IsolatedLRU", "S3FIFO" or "noop". Usable range: [first_offset, first_offset + capacity_bytes).
        `slot_table`: address of one u64 for each align_bytes of the capacity, zero at first, in memory that outlives the
        process; what is handed out is written down there (docs/formats/shared_memory.md). 0: nothing is kept."""
    def close(self) -> None:
        """Waits for the call that is under way. From then on every method raises ServerUnavailable and touches nothing.
        Idempotent."""
    def recover(self, found: RecoveredFrames, salts: Sequence[str | None], live_owners: Buffer) -> Recovered:
        """Fills a core that never held anything with the frames of the previous server. `salts`: those of
        `found.namespaces`, None where one is to be dropped. Slots that owners in `live_owners` (i64) were writing are
        quarantined, those of others are free."""
    def set_committed(self, committed_bytes: int) -> None:
        """How much of the capacity has memory behind it; the allocator never goes beyond. Only grows."""
    def probe(self, namespaces: Buffer, hashes: Buffer) -> int:
        """Length in chunks of the longest prefix that is resident in every namespace. Takes nothing, touches nothing."""
    def acquire(
        self, owner: int, namespaces: Buffer, hashes: Buffer, deadline: float, *, is_use: bool = True, tails: Buffer = b""
    ) -> Acquired:
        """Leases that prefix. Marks use so that a suffix is evicted before its prefix; without `is_use` the objects are
        held and keep the turn that they had. `tails`: u32 per namespace, of how many chunks at the end of the prefix it
        must have objects, 0 for all of them; what lies before a tail is not leased (NO_SLOT). Empty: no tails."""
    def acquire_each(self, owner: int, namespaces: Buffer, hashes: Buffer, deadline: float) -> Acquired:
        """Leases as one, pairwise (namespace_i, hash_i), what is resident of these objects, without use. `chunks` counts
        them; `slots` has one for each pair, NO_SLOT for what is not there."""
    def resident_each(self, namespaces: Buffer, hashes: Buffer) -> bytes:
        """One byte for each pair (namespace_i, hash_i): 1 if that object is resident."""
    def touch(self, namespaces: Buffer, hashes: Buffer, *, tails: Buffer = b"") -> int:
        """Marks use of that prefix without leasing it; returns its chunks. A prompt that was stored in several steps gets
        its order (suffix evicted before prefix) when its whole prefix is touched at the end of the request. A namespace
        with a tail does not shorten the prefix: what it has is touched."""
    def release(self, lease: int) -> bool:
        """Idempotent; False if the lease is unknown or already released."""
    def renew(self, owner: int, deadline: float) -> int:
        """Moves the deadline of every lease and reservation of an owner; returns how many."""
    def reserve(
        self,
        owner: int,
        namespaces: Buffer,
        salt: str,
        sizes: Buffer,
        hashes: Buffer,
        deadline: float,
        *,
        wanted: Buffer = b"",
    ) -> Reserved:
        """Slots for n chunks in m namespaces of one salt.

        `wanted`: one byte per (namespace, chunk), 0 where no slot is wanted; empty: everywhere.
        sizes: u64 bytes of the whole frame per namespace (rounded up to the alignment inside). NO_SLOT where the object is
        resident or staged already. Evicts inline; when room runs out the longest prefix of chunks gets slots, no
        chunk partly."""
    def commit(
        self,
        reservation: int,
        written: Buffer = b"",
        *,
        lease_owner: int = 0,
        deadline: float = 0.0,
        temporary: bool = False,
    ) -> Committed:
        """Ends a reservation.

        `written`: one byte per (namespace, chunk), 1 = publish, 0 = abort; empty = publish all. With lease_owner the new
        objects are leased at once. `temporary` objects vanish with their last lease. An unknown, expired or already ended
        reservation commits nothing - never an error, never a publish."""
    def abort(self, reservation: int) -> bool: ...
    def quarantine(self, reservation: int) -> bool:
        """Its writer is late: the keys are free for others at once, the memory with abort. It cannot be committed any more."""
    def expire(self, now: float) -> EndedClaims:
        """Ends leases and quarantines reservations that are past their deadline. A quarantined reservation can no longer
        be committed; its memory stays taken until drop_owner or abort."""
    def drop_owner(self, owner: int) -> EndedClaims:
        """The owner is gone and writes no more: its leases end, its reservations are freed."""
    def evict(self, target_bytes: int) -> Removed:
        """Frees at least that many bytes if it can. Leased objects are never victims."""
    def set_limit(self, salt: str, limit_bytes: int) -> None:
        """Under IsolatedLRU, what the objects of a salt may keep; 0 is what a salt has that was never given one. A salt goes
        beyond its limit while there is room; what it has beyond goes first, and never costs a salt within its limit
        anything. Without effect under other policies."""
    def enforce_limits(self, *, spare_new: bool = False) -> Removed:
        """Evicts what salts have above their limits as far as nobody reads it. With `spare_new` not what became resident
        since the last such call."""
    def take_overuses(self) -> list[Overuse]:
        """Salts that stored, or had no room to store, beyond their limits since the last call; each once for as long as
        it has objects."""
    def remove(self, namespaces: Buffer, hashes: Buffer) -> int:
        """Removes unleased objects, pairwise (namespace_i, hash_i): how many."""
    def clear(self) -> Removed:
        """Removes every unleased object. Leased ones are not found any more and vanish with their last lease."""
    def list_objects(self, start: int, count: int) -> ObjectPage: ...
    def stats(self) -> dict[str, int]:
        """capacity_bytes, committed_bytes, used_bytes, free_bytes, largest_free_bytes, objects, staged, leases,
        leased_objects, reservations, quarantined_bytes, evicted_objects, evicted_bytes, allocation_failures (chunks), index_bytes,
        above_limits_bytes (what salts take beyond their limits), namespaces, salts (known now)."""
    def set_age_sample_rate(self, rate: float) -> None:
        """The fraction of objects stored from now on that is sampled for `take_ages`, 0 (as at first) to 1. Always the same
        keys."""
    def take_ages(self) -> Ages:
        """Of sampled objects, since the last call."""
    def usage_of(self, salt: str) -> int: ...
    def salt_usage(self) -> list[tuple[str, int]]: ...
    def check(self) -> None:
        """Asserts every invariant (used + free == committed, lists, counts); RuntimeError names the one broken. O(objects)."""

# ---- L2: what an adapter holds and in which order it may go ---------------------------------------------------------
# Keys are sequences of lmcache.core.key.ObjectKey, in prefix order.
class LedgerChange:
    @property
    def objects(self) -> int: ...
    @property
    def bytes(self) -> int: ...

class LedgerPage:
    """Some objects. `namespaces` are encoded; the rest are columns of one length."""

    def __len__(self) -> int: ...
    @property
    def namespaces(self) -> list[bytes]: ...
    @property
    def positions(self) -> bytes:
        """u32 each: where the object's namespace is in `namespaces`."""
    @property
    def hashes(self) -> bytes:
        """32 bytes each."""
    @property
    def charges_bytes(self) -> bytes:
        """u64 each."""
    @property
    def next_start(self) -> int:
        """Where the next page starts; 0 after the last one."""

class LedgerStats:
    @property
    def objects(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def reserved_bytes(self) -> int: ...
    @property
    def folders(self) -> int: ...
    @property
    def leaving_objects(self) -> int:
        """Victims whose deletion has not ended; among `objects`."""
    @property
    def read_objects(self) -> int: ...
    @property
    def namespaces(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...

class LedgerHold:
    """What one reader holds."""

class Ledger:
    """Thread-safe. What a call costs depends on its keys, not on how many objects are known."""

    def __init__(self, policy: str) -> None:
        """"LRU", "IsolatedLRU", "S3FIFO" or "noop"."""
    def set_capacity(
        self, *, limit_bytes: int | None, unit_bytes: int, object_overhead_bytes: int, folder_bytes: int
    ) -> None:
        """An object is charged its size rounded up to a unit, plus the overhead; what is known already keeps its charge.
        `folder_bytes` of each folder: one a namespace, and in it one for each first byte of a hash; 0 where there are
        none."""
    def set_limit(self, salt: str, limit_bytes: int) -> None:
        """Under IsolatedLRU: in which ratio the salts share. 0: no limit; such a salt gives first."""
    def known(self, keys: Sequence[ObjectKey]) -> bytes:
        """A byte each: 0 unknown, 1 known, 2 leaving."""
    def stored(self, keys: Sequence[ObjectKey], sizes_bytes: Sequence[int]) -> LedgerChange:
        """Known from now on, and the youngest: how many are new, what all are charged."""
    def found(self, keys: Sequence[ObjectKey], sizes_bytes: Sequence[int]) -> LedgerChange:
        """Youngest first, and older than all that is known; what is known already is left as it is: what is new."""
    def found_rows(
        self,
        namespaces: Sequence[Namespace],
        positions: Buffer,
        hashes: Buffer,
        sizes_bytes: Buffer,
        rows: Buffer,
    ) -> LedgerChange:
        """`found` of the rows (u32), in that order, of columns (u32, 32 bytes and u64 an object). Objects whose namespace
        is None are passed over."""
    def touch(self, keys: Sequence[ObjectKey]) -> int:
        """They were used: how many are known."""
    def lost(self, keys: Sequence[ObjectKey]) -> LedgerChange:
        """They are gone without having been evicted: what was known."""
    def victims(self, wanted_bytes: int, most: int) -> LedgerPage:
        """Who goes next until they have `wanted_bytes`, at most so many. They are leaving until `evicted` or
        `not_evicted`: charged, to be loaded, and no victims."""
    def evicted(self, keys: Sequence[ObjectKey]) -> LedgerChange:
        """What has gone of them; those that are not leaving are left as they are."""
    def not_evicted(self, keys: Sequence[ObjectKey]) -> None:
        """Those that are leaving stay, in their former places."""
    def hold(self, keys: Sequence[ObjectKey]) -> LedgerHold:
        """Those that are known are no victims until `let_go`."""
    def let_go(self, hold: LedgerHold) -> None:
        """Idempotent."""
    def lacking(self, keys: Sequence[ObjectKey], charge_bytes: int, other_bytes: int) -> int:
        """Bytes that must go before these keys may be stored, beside `other_bytes` of the backend."""
    def reserve(self, keys: Sequence[ObjectKey], charge_bytes: int) -> None: ...
    def give_back(self, keys: Sequence[ObjectKey], charge_bytes: int) -> None:
        """Keys that were reserved for."""
    def begin_scan(self) -> int:
        """The number of a scan: objects that are stored or found from now on have been seen by it."""
    def list(self, start: int, most: int, unseen_by: int | None = None) -> LedgerPage:
        """A page of at most `most` known objects, maybe empty, from `start` on, which is 0 at first. Objects stored
        meanwhile may be missed. `unseen_by`: only those that this scan, one of the last 255, has not seen."""
    def stats(self) -> LedgerStats: ...
    def check(self) -> None:
        """RuntimeError that names the broken invariant. O(objects)."""

# ---- file I/O ------------------------------------------------------------------------------------------------------
class FileIO:
    """Reads and writes whole files from and into memory on native threads; completion is signalled by an eventfd."""

    def __init__(self, threads: int, use_odirect: bool, block_bytes: int, read_ahead_bytes: int = 0, queue_depth: int = 0) -> None:
        """`queue_depth` above 0: transfers by io_uring, at most that many at once; OSError where it is refused."""
    def event_fd(self) -> int: ...
    def submit_write(self, paths: Sequence[str], temporary_paths: Sequence[str], addresses: Buffer, sizes: Buffer) -> int:
        """Each file: write to the temporary path, then rename. u64 addresses and sizes. Returns a job number. Files of
        a job are published in order, so that an interrupted job leaves a prefix. (docs/formats/files.md)"""
    def submit_read(self, paths: Sequence[str], addresses: Buffer, capacities: Buffer) -> int: ...
    def submit_read_frames(self, base: str, buffers: list[memoryview], frame_names: Buffer) -> int:
        """`frame_names`: 32 + 32 bytes a file below `base`, its namespace digest and chunk hash. What is not that frame,
        whole and with the right checksum, fails with EBADMSG; it is checked while it is read."""
    def submit_stat(self, paths: Sequence[str]) -> int: ...
    def submit_unlink(self, paths: Sequence[str]) -> int: ...
    def submit_remove_empty(self, folders: Sequence[str]) -> int:
        """Removes each folder that has nothing in it, and the one above it on the same condition."""
    def drain(self) -> list[tuple[int, memoryview, memoryview]]:
        """Jobs that have ended: (job, i64 value per file, i32 errno per file). Value: bytes moved, or file size for
        stat, 0 for unlink and remove_empty, -1 with errno on failure."""
    def buffered_fallbacks(self) -> int:
        """Transfers that went through the page cache although O_DIRECT was asked for."""
    def close(self) -> None:
        """Waits for everything submitted. Idempotent."""

class RespClient:
    """Frames to and from Redis or Valkey (RESP2) on native threads, with a connection each to each server. `keys`: 64 bytes
    an object, the digest of its namespace and its chunk hash. Submissions return a job number."""

    def __init__(
        self,
        *,
        threads: int,
        prefix: str,
        username: str,
        password: str,
        database: int,
        no_touch: bool,
        timeout_seconds: float,
        max_value_bytes: int,
        tls: bool,
        tls_ca: str,
        tls_cert: str,
        tls_key: str,
        tls_server_name: str,
    ) -> None:
        """Does not connect. RuntimeError where TLS cannot be had. `no_touch`: what is read does not count as a use."""
    def assign_nodes(self, addresses: list[tuple[str, int]], slots: list[tuple[int, int, int]]) -> None:
        """A host that begins with "/" is the path of a Unix socket. `slots`: first and last (included) of a cluster, and the
        position of their server; [] where the first server has everything."""
    def submit_store(self, keys: Buffer, buffers: list[memoryview]) -> int: ...
    def submit_load(self, keys: Buffer, buffers: list[memoryview]) -> int:
        """EBADMSG for what is not the whole frame of its key."""
    def submit_sizes(self, keys: Buffer) -> int: ...
    def submit_delete(self, keys: Buffer) -> int:
        """Values: 1 where there was one, else 0."""
    def submit_scan(self, node: int, cursor: int) -> int:
        """Detail: (next cursor, keys, u64 sizes, u64 idle seconds)."""
    def submit_sweep_parts(self, node: int, cursor: int) -> int: ...
    def submit_command(self, arguments: list[bytes], node: int | None = None) -> int:
        """Detail: the reply; texts are bytes, an error of the server is a str."""
    def event_fd(self) -> int: ...
    def drain(self) -> list[tuple[int, memoryview, memoryview, Any]]:
        """Jobs that have ended: (job, i64 value per object, i32 errno per object, detail). Value: bytes moved or held, -1
        with errno on failure."""
    def wait(self, job: int, timeout_seconds: float) -> tuple[int, memoryview, memoryview, Any] | None:
        """One job; None when it still runs."""
    def last_error(self) -> str: ...
    def changes(self) -> int: ...
    def connections(self) -> int: ...
    def close(self) -> None:
        """Ends what is under way. Idempotent."""

class FolderScan:
    """Objects in columns of one length, in no order: 32-byte `hashes`, `used_ns` (i64, last use since 1970), `sizes` (u64
    bytes). `temporary`: paths that end in ".tmp". `empty`: folders with nothing in them. `unreadable`: (folder, errno)."""

    hashes: Final[bytes]
    used_ns: Final[bytes]
    sizes: Final[bytes]
    temporary: Final[list[str]]
    empty: Final[list[str]]
    unreadable: Final[list[tuple[str, int]]]

def scan_folders(folders: Sequence[str], threads: int) -> FolderScan:
    """What is in each of these folders of a file adapter (docs/formats/files.md). A folder that is gone is left out."""

def youngest_first(used_ns: Buffer) -> bytes:
    """i64 times to u32 positions, the latest time first."""

# ---- mapped storage ------------------------------------------------------------------------------------------------
class MappedCopier:
    """Streaming copies between memory and storage that is mapped into it, on native threads; completion is signalled by
    an eventfd. A page that the medium cannot give fails an element instead of raising SIGBUS. All lists are u64, one
    element each; what is in the mapping is named by its address."""

    def __init__(self, mapping_address: int, mapping_bytes: int, threads: int, flush: bool) -> None:
        """`flush`: what was written has left the processor's caches before its record is written, and the record before
        the job is reported."""
    def event_fd(self) -> int: ...
    def submit_read(self, destinations: Buffer, sources: Buffer, sizes: Buffer) -> int:
        """Out of the mapping, elements on all threads. Returns a job number."""
    def submit_write(
        self, destinations: Buffer, sources: Buffer, sizes: Buffer, record_places: Buffer, records: Buffer, record_bytes: int
    ) -> int:
        """Into the mapping, in order, on one thread: each element, then its record. Size 0: the record alone. After an
        element that failed nothing more of the job is written."""
    def drain(self) -> list[tuple[int, bytes]]:
        """Jobs that have ended: (job, one byte an element, 1 = copied)."""
    def close(self) -> None:
        """Waits for everything submitted. Idempotent."""

def make_dax_entries(device: Buffer, slots: Buffer, names: Buffer, frame_bytes: Buffer, used_ns: int) -> bytes:
    """Directory entries (docs/formats/dax.md) of slots (u64) and what they hold: names of 64 bytes, u64 bytes of frames.
    `used_ns`: of the first; each one is a microsecond older than the one before."""

class DaxDirectory:
    """Objects, last used first: u32 `slots`, `names` of 64 bytes, u64 `frame_bytes`. Beside them u32 slots that are `free`. Each
    access copies."""

    slots: Final[memoryview]
    names: Final[bytes]
    frame_bytes: Final[memoryview]
    free: Final[memoryview]

def read_dax_directory(device: Buffer, entries: Buffer, stride: int) -> DaxDirectory:
    """All entries of the directory (docs/formats/dax.md). One that does not verify, or of a frame of more than `stride` bytes, is
    free."""

# ---- raw devices ---------------------------------------------------------------------------------------------------
def io_uring_refusal() -> int:
    """0 where this process may use io_uring, else the errno that says why not."""

class DeviceIO:
    """Ranges of one open file or block device, moved by threads (`queue_depth` 0) or by io_uring with at most
    `queue_depth` transfers under way. `fd` stays the caller's. OSError where io_uring is refused."""

    def __init__(self, fd: int, threads: int, queue_depth: int, align_bytes: int, copy_always: bool = False) -> None: ...
    def event_fd(self) -> int: ...
    def submit_write(self, offsets: Buffer, addresses: Buffer, sizes: Buffer, heads: Buffer) -> int:
        """u64 each. `heads`: empty, or the address of 4096 bytes that take the place of the first 4096 (0: none)."""
    def submit_read(self, offsets: Buffer, addresses: Buffer, sizes: Buffer) -> int: ...
    def submit_sync(self) -> int:
        """fdatasync."""
    def drain(self) -> list[tuple[int, memoryview, memoryview]]:
        """As FileIO.drain; values are bytes moved. A read ends early at the end of the file."""
    def copied(self) -> int:
        """Transfers that did not fit O_DIRECT and went through memory of their own."""
    def close(self) -> None:
        """Waits for everything submitted. Idempotent."""

class SlotHeader:
    device: Final[bytes]
    slot: Final[int]
    generation: Final[int]
    namespace: Final[bytes]  # encoded
    chunk_hash: Final[bytes]
    payload_bytes: Final[int]

def slot_header_parse(header: Buffer) -> SlotHeader:
    """ValueError where these bytes are not the header of a slot."""

class RawBatch:
    """A batch of a RawIndex that is under way; keep it until its end."""

class RawIndex:
    """What is where on a raw device (docs/formats/raw_block.md), batch by batch. Keys are `spaces` (u32, by intern(); what
    no intern() gave is unknown) and `hashes` (32 bytes each); slots and pages are u32. Not thread-safe."""

    def __init__(
        self, slots: int, slot_bytes: int, frame_limit_bytes: int, first_slot_offset: int, page_bytes: int, first_generation: int, device: Buffer
    ) -> None: ...
    @property
    def objects(self) -> int: ...
    @property
    def object_bytes(self) -> int: ...
    @property
    def free_slots(self) -> int: ...
    @property
    def next_generation(self) -> int: ...
    def intern(self, digest: Buffer, number: int) -> int:
        """A new namespace. `number`: its page on the device, or 2**32 - 1."""
    def take_unused_spaces(self) -> memoryview:
        """u32: namespaces that have neither objects nor transfers under way. Their ids are given to others from now on."""
    def set_number(self, space: int, number: int) -> None: ...
    def load_pages(self, first: int, pages: Buffer, spaces: Buffer, forget: bool) -> None:
        """Recovery: pages of the table from `first` on. `spaces`: u32 by namespace number, 2**32 - 1 for unknown ones.
        `forget`: nothing counts but generations."""
    def slots_to_scan(self) -> memoryview:
        """Slots of which the pages did not tell."""
    def add(self, slot: int, space: int, hash: Buffer, size_bytes: int, generation: int) -> None:
        """What the header of such a slot tells."""
    def finish_recovery(self, gap: int) -> None:
        """Then the index is ready. `gap`: generations that may have been used without a trace."""
    def youngest_first(self) -> memoryview:
        """Slots of all objects, last used first."""
    def begin_store(self, io: DeviceIO, spaces: Buffer, hashes: Buffer, buffers: list[memoryview], heads: int) -> tuple[RawBatch, int]:
        """Submits what is not there yet; (batch, its number in `io` or 0). `heads`: address of 4096 bytes a key."""
    def end_store(self, batch: RawBatch, errors: Buffer, now: int) -> tuple[bytes, memoryview]:
        """(one code a key: 0 failed, 1 stored, 2 already there, 3 too large, 4 full; pages to write, one after the
        other). `now`: microseconds since 1970."""
    def begin_load(self, io: DeviceIO, spaces: Buffer, hashes: Buffer, buffers: list[memoryview]) -> tuple[RawBatch, int]:
        """Submits what is there. Its slots are not written before end_load, which must follow."""
    def end_load(self, batch: RawBatch, results: Buffer, errors: Buffer, now: int) -> tuple[bytes, memoryview]:
        """(one code a key: 0 missing, 1 loaded, 2 corrupt, 3 failed; positions of keys to remove as corrupt)."""
    def begin_erase(self, io: DeviceIO, first: int, count: int, zeros: int) -> tuple[memoryview, int]:
        """Submits 4096 zeros to free slots, from `first` on, that may have the header of a former object; (slots, number)."""
    def end_erase(self, slots: Buffer, errors: Buffer) -> None: ...
    def read_headers(self, io: DeviceIO, slots: Buffer, memory: int) -> int:
        """Submits reading 4096 bytes of each slot."""
    def misplaced(self, slots: Buffer, generations: Buffer, headers: int, results: Buffer, errors: Buffer) -> memoryview:
        """Slots that still hold the object of that generation and whose header (read_headers) is another's."""
    def sizes_of(self, spaces: Buffer, hashes: Buffer) -> memoryview:
        """u64 bytes a key, 0 where nothing is there."""
    def describe(self, slots: Buffer) -> tuple[memoryview, bytes, memoryview]:
        """(u32 spaces, hashes, u64 bytes) of slots; 0 bytes where nothing is."""
    def claimed_from(self, first: int, count: int) -> tuple[memoryview, memoryview]:
        """(slots, u64 generations) of at most that many objects from slot `first` on."""
    def remove(self, spaces: Buffer, hashes: Buffer) -> memoryview:
        """The slots, each of which goes to release_slots() when its page is written."""
    def remove_all(self) -> memoryview:
        """The same for everything. What is being stored is not there either; `next_generation` is the first that is."""
    def release_slots(self, slots: Buffer) -> None:
        """The table on the device no longer claims them."""
    def pages_of(self, slots: Buffer) -> memoryview: ...
    def dirty_pages(self) -> memoryview:
        """Pages that are newer here than on the device, and may wait."""
    def page_image(self, page: int) -> bytes:
        """A page of the table as it is to be written now."""
    def check(self) -> None:
        """Asserts every invariant; RuntimeError names the one broken. O(slots)."""
