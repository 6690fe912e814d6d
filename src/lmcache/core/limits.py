"""Every limit, in one place. Beyond a limit there is a clear error or a miss, never unbounded growth."""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30  # "GB" in flags and documents means this

FRAME_HEADER_BYTES = 4096
FRAME_ALIGN_BYTES = 4096

# protocol
MAX_MESSAGE_BYTES = 20 * MIB  # of a call or an answer, over all its frames
MAX_UNFINISHED_BYTES = 256 * MIB  # of messages that have begun to arrive, of all connections
MAX_UNSENT_BYTES = GIB  # of answers that clients do not take, of all connections
MAX_UNSENT_BYTES_PER_CONNECTION = 64 * MIB
MAX_CONNECTIONS = 4096
MAX_HANDSHAKES = 1024  # connections that have not done theirs; beyond, the oldest of them ends
MAX_CURVE_CLIENTS = 4096  # public keys that are let in
SERVER_EPOCH_BYTES = 16
PROCESS_ID_BYTES = 16
MAX_TOKENS_PER_SESSION = 4 * MIB  # 16 MiB of uint32
MAX_LOOKAHEAD_TOKENS = 256  # behind a chunk that its name covers: they are in the identity
MAX_CHUNKS_PER_CALL = 16_384
MAX_OBJECT_GROUPS = 64
MAX_SLOTS_PER_CALL = MAX_CHUNKS_PER_CALL * MAX_OBJECT_GROUPS  # chunks times namespaces
MAX_WORLD_SIZE = 1024
MAX_TENSORS = 1024  # that a worker describes
MAX_TENSOR_DIMENSIONS = 16
MAX_DTYPE_CHARACTERS = 64
MAX_NAMESPACES_PER_TENANT = 4096  # ranks x object groups of one instance
MAX_NAME_BYTES = 512  # model names, salts, request ids
MAX_TRANSFER_MODES = 16  # that a server offers
MAX_INSTANCES = 1024
MAX_SESSIONS_PER_INSTANCE = 8192
MAX_SESSION_BYTES = GIB  # of all sessions; each instance has an equal share that others cannot take
SESSION_BASE_BYTES = 1024  # that a session takes beside its names, hashes, tokens, extras and slots
MAX_IDENTITY_BYTES = 4096
MAX_EXTRAS_PER_SESSION = 16_384
MAX_RESERVATIONS_PER_WORKER = 4096
MAX_RESERVATION_BYTES_PER_WORKER = 64 * MIB  # their chunk hashes and offsets
MAX_OBJECT_BYTES = 4 * GIB
MAX_CALLS_IN_FLIGHT_PER_CLIENT = 4096
MAX_UNCONFIRMED_MESSAGES = 16_384  # unconfirmed releases and ends of sessions of one engine
MAX_DEFERRED_CALLS = 16_384  # of all clients: lookups that wait for L2

# prefill and decode apart
MAX_HANDOVER_WAITS = 256  # lookups that wait for chunks that another engine is storing
MAX_HANDOVER_WAIT_SECONDS = 30.0
HANDOVER_START_SECONDS = 2.0  # to the store of a chunk that was announced, while its engine stores nothing else

# changes that engines follow for the KV events of routers
MAX_CHANGES_PER_CALL = 1024  # looked at, of all indexes
MAX_CHUNKS_ASKED_FOR = 1024  # in one call, beside what has changed
MAX_SALTS_FOLLOWED = 1024  # by one engine
MAX_INDEXES_FOLLOWED = 64  # L1 and adapters
MAX_CHUNKS_ANNOUNCED = 32_768  # that an engine remembers, with their tokens and blocks: 2 KB each
MAX_ORDERS_NOTED = 4096  # requests whose chunks an engine has not remembered yet
MAX_EVENTS_WAITING = 4096  # for a step of the engine; beyond, it reads no changes
CHANGES_UNREAD_SECONDS = 60.0  # then they are no longer kept

# KV events of the server itself
MAX_CHUNKS_PER_KV_EVENT = 64
MAX_CHUNKS_PER_KV_EVENT_BATCH = 256
MAX_KV_EVENTS_WAITING = 256  # batches, for each subscriber that does not read them
MAX_KV_EVENTS_KEPT = 10_000  # batches, to be repeated
MAX_KV_EVENTS_KEPT_BYTES = 64 * MIB
MAX_CHUNKS_DESCRIBED = 32_768  # whose tokens are remembered, 1 KB each with chunks of 256 tokens
MAX_UNREAD_PROMPT_BYTES = 64 * MIB  # whose chunks are not remembered yet
MAX_RANK_LAYOUTS = 8  # of an object group of a model, in which its chunks are told
MAX_KV_EVENT_TOPICS = 1024
KV_EVENT_LISTED_PER_SECOND = 16_384  # chunks of what was there before, beside all changes
KV_EVENT_RETELLING_SECONDS, MAX_KV_EVENT_RETELLING_SECONDS = 1.0, 60.0  # before one, doubled where changes stay lost

# payload over the socket
MAX_PAYLOAD_PART_BYTES = MIB  # of one message: what PING and other engines may have to wait behind
PAYLOAD_WINDOW_BYTES = 8 * MIB  # that a worker has on its way, asked for or sent
MAX_PAYLOAD_BYTES_PER_WORKER = 32 * MIB  # that the server holds for a worker: not yet copied, or not yet sent
MAX_PAYLOAD_BYTES = GIB  # the same for all workers
PAYLOAD_STAGING_BYTES = 64 * MIB  # of a worker's own memory, half for loads and half for stores; at least a frame each

# memory
L1_MEMORY_MARGIN_BYTES = 256 * MIB  # of the machine's or container's memory that L1 leaves to others
MAX_SHM_NAME_BYTES = 200
L1_FIRST_STEP_BYTES = 16 * MIB  # that a server takes before it says that it is ready
L1_GROW_STEP_BYTES = 64 * MIB  # taken at a time in the background
L1_GROW_INLINE_BYTES = 256 * MIB  # at most, while a reservation waits
L1_HEADROOM_BYTES = GIB  # what a lazy L1 keeps ready beyond what is used
MAX_PREFAULT_THREADS = 8
L1_LATE_IO_SECONDS = 60.0  # that I/O of a killed server may take to end in memory that the next server recovered

# storage
MAX_L2_BATCH_OBJECTS = 64
L2_STORE_BATCH_BYTES = 64 * MIB  # a batch ends at the object that goes beyond
LOADS_OF_A_WINDOW = 4  # at least, where an adapter takes more than MAX_L2_BATCH_OBJECTS in a load
L2_LOAD_BATCH_BYTES = 17 * MIB  # 16 MiB of payloads and 256 headers: one is verified while the next is read
L2_STORE_BATCHES_IN_FLIGHT = 2  # an adapter
MAX_L2_STORE_QUEUE_OBJECTS = 65_536  # of all adapters, each an equal share
MAX_L2_UNSTORED_OBJECTS = 65_536  # that no adapter took and that L1 keeps under skip_l1; the oldest are given up
MAX_L2_PREFETCH_BYTES_IN_FLIGHT = 4 * GIB  # an adapter; L2_MAX_READS_IN_FLIGHT bounds what is given up
L2_DEFAULT_TIMEOUT_SECONDS = 30.0
L2_RETRIES = 2
L2_BREAKER_FAILURES = 5
L2_BREAKER_OPEN_SECONDS = 5.0  # doubled with every failed trial, up to ...
L2_BREAKER_MAX_OPEN_SECONDS = 60.0
L2_RETRY_BACKOFF_SECONDS = 0.05  # before the first retry, then doubled
L2_MAX_READS_IN_FLIGHT = 8  # operations an adapter, running or abandoned
L2_MAX_PROBES_IN_FLIGHT = 8  # beside the loads
L2_MAX_WAITS_IN_FLIGHT = 32  # probes a place of an adapter that wait for what is being stored there
L2_MAX_WRITES_IN_FLIGHT = 4
# Of one search of a bucket or a Redis server, which itself says when it ends.
MAX_L2_LISTED_OBJECTS = 1 << 26
MAX_L2_LISTED_NAMESPACES = 1 << 16
MAX_L2_LISTED_PAGES = 1 << 20
MAX_L2_KNOWN_OBJECTS = 1 << 24  # of an adapter without a capacity, about 100 bytes each; it is asked for the others
MAX_L2_SIZES_REMEMBERED = 1 << 18  # of objects in a backend that tells none; the rest are as others of their namespace
L2_SERDE_MEMORY_BYTES = 384 * MIB  # an adapter, for encoded frames on their way; one larger batch alone may have more
MAX_SERDES_NAMED = 16  # of other servers in one backend, in the log
MAX_L2_UNREADABLE_OBJECTS = 65_536  # an adapter, remembered so that a store replaces them
MAX_QUARANTINE_FILES = 64  # a folder; the oldest go first
MAX_QUARANTINE_BYTES = 256 * MIB
MAX_PREFETCHES_WAITING = 4096  # for a place, or for adapters

# peers
MAX_PEERS = 256  # members; what is beyond is left out
PEER_UNNAMED_SECONDS = 60.0  # that a connected peer is kept when no coordinator names it any more
MAX_PEER_CONNECTIONS = 2048  # of others to this server
MAX_PEER_HANDSHAKES = 64  # connections of others that have not done theirs
MAX_PEER_KEYS = 16_384  # of one lookup
MAX_PEER_READ_KEYS = 256  # of one read
MAX_PEER_MESSAGE_BYTES = 2 * MIB  # frames not counted
MAX_PEER_HELLO_BYTES = 8192  # of a message before the handshake is done
MAX_PEER_TEXT_BYTES = 512
MAX_PEER_LEASES = 4096  # of all peers
PEER_LEASED_FRACTION = 0.25  # of L1, that all peers may keep from eviction by their lookups
MAX_PEER_WAITS = 256  # lookups that wait for chunks that are being stored
MAX_PEER_WAIT_SECONDS = 30.0
MAX_PEER_PLACEMENTS = 262_144  # objects that peers said they have, remembered until they are loaded
MAX_PEER_LOOKUPS = 64  # that one peer has not answered
MAX_PEER_LOADS = 8  # from one peer at once; others wait, and keep nothing of other peers waiting
MAX_PEER_READS = 4  # of these over the network, a connection each
MAX_PEER_CALLS = 512  # loads from all peers, running or waiting; as many lookups, and as many that wait
PEER_LOAD_THREADS = 256  # for loads from all peers, started when they are needed
MAX_PEER_COPY_THREADS = 8  # for copies out of the memory of all peers on this host, at most one a CPU
PEER_SEND_THREADS = 8  # for reads of all peers
MAX_PEER_SENDS = 4  # of these, for peers of one host
PEER_PATIENCE_SECONDS = 0.02  # that a request waits for what peers have
PEER_HELLO_SECONDS = 5.0
PEER_LEASE_SECONDS = 10.0  # from a lookup to the read, and from one read to the next
PEER_IDLE_SECONDS = 2.0  # without a byte of a transfer
PEER_VANISHED_SECONDS = 20  # without a sign of the other machine, at least 4: its connections end
PEER_LOAD_FLOOR_SECONDS = 2.0  # of the deadline of a load; what its size takes comes on top
PEER_LEAST_READ_SECONDS = 0.2  # that a transfer engine has for a read, or does not begin it
PEER_LOAD_MARGIN = 8  # how many times longer a load may take than at the measured rate
PEER_FIRST_RATE = 50e6  # bytes a second, until one is measured
PEER_BREAKER_FAILURES = 3
PEER_RETRY_SECONDS, MAX_PEER_RETRY_SECONDS = 0.25, 4.0  # between connections that fail, doubled each time
PEER_REFUSED_SECONDS = 30.0  # before a peer is asked again that does not fit

# tenants
MAX_QUOTAS = 65_536
MAX_QUOTA_GB = 1 << 20
MAX_SALTS_NAMED = 1024  # in the log, for going beyond their quotas
MAX_TENANTS_KEPT_PER_INSTANCE = 1024  # salts whose namespaces are at hand; those of others are made again
MAX_NAMESPACES_KEPT_PER_INSTANCE = 16_384  # of those salts, for each rank and for all ranks together

# administration over HTTP
MAX_HTTP_BODY_BYTES = 64 * 1024
MAX_HTTP_LARGE_BODY_BYTES = 4 * MIB  # of requests with tokens or keys
MAX_HTTP_TOKENS = 512 * 1024
MAX_HTTP_KEYS = 16_384
MAX_HTTP_PAGE = 10_000
MAX_REASON_CHARACTERS = 4096  # of another server's sentence, which is kept with what it refused or did not do
MAX_HTTP_EXAMINED_OBJECTS = 1 << 20  # for one page, where most are passed over
HISTORY_SECONDS = 3600.0  # of figures that the dashboard draws
MAX_HISTORY_SERIES = 2048
MAX_HISTORY_TENANTS = 32  # models, and salts, with a series of their own in it
MAX_PINS = 4096
MAX_PINNED_OBJECTS = 262_144
MAX_PIN_SECONDS = 7 * 24 * 3600
MAX_JOBS_WAITING = 64
MAX_JOBS_KEPT = 256  # that have ended
MAX_NAMESPACES_REMEMBERED = 16_384  # of objects that operators named or listed

# weights
MAX_WEIGHT_FILES_READ_AT_ONCE = 8  # of a model, for the sample that names it

# a fleet and its coordinator
MAX_FLEET_INSTANCES = 4096
MAX_FLEET_CONNECTIONS = 2 * MAX_FLEET_INSTANCES  # to a coordinator: all servers may come at once, for two things each
MAX_FLEET_COPIES = 1 << 27  # that a directory knows, at most 64 bytes each
MAX_FLEET_NAMESPACES = 1 << 20  # of which a coordinator knows how many ranks there are
MAX_FLEET_PLACES_PER_INSTANCE = 32  # tiers and backends
MAX_FLEET_UNFINISHED_RESYNCS = 4  # of an instance; beyond, what the oldest one has not told again is forgotten
MAX_FLEET_RESYNCS = 16  # at a time, of servers that ask
MAX_FLEET_EVENT_BYTES = 16 * MIB  # of a request with events
MAX_FLEET_EVENT_ENTRIES = 16_384  # of a batch
MAX_FLEET_COPIES_SHOWN = 64  # of a key, unless a request asks for more
MAX_FLEET_COPIES_ASKED = 1 << 20  # of all keys of such a request
MAX_FLEET_COPIES_EXAMINED = 1 << 19  # for who has how much of a prompt: a router waits two seconds
MAX_FLEET_METADATA_BYTES = 4096  # that an instance tells of itself
MAX_COORDINATOR_ASKS = 256  # of a router that have not ended, a thread each
MAX_FLEET_PINS = 4096
MAX_FLEET_ENDED_QUOTAS = 4096  # remembered, for servers that were away when a quota ended
MAX_FLEET_JOBS_WAITING = 256
MAX_FLEET_JOBS_KEPT = 1024  # that have ended
MAX_MEMBER_ANSWER_BYTES = 16 * MIB  # that a server reads of a coordinator; of each server there are about 4 KB at most
MAX_FLEET_ANSWER_BYTES = 4 * MIB  # that a coordinator reads of a server
MAX_NAMED_PARTIALS = 1024  # partial chunks that operators ask for by their tokens, behind one prompt
REPORTED_ENTRIES = 4096  # of a request that a server sends as text
REPORTED_OBJECTS = 65_536  # of one with columns
MAX_LOGGED_EVENT_REQUESTS = 1024  # that a log keeps between servers and coordinator, at most 1.5 MB each as these send
MAX_TOLD_LOG_REQUESTS = MAX_LOGGED_EVENT_REQUESTS // 2 // MAX_FLEET_RESYNCS  # unread, of a server that tells everything

assert MAX_HTTP_KEYS * MAX_FLEET_COPIES_SHOWN <= MAX_FLEET_COPIES_ASKED
assert MAX_FLEET_INSTANCES * 4096 <= MAX_MEMBER_ANSWER_BYTES
assert REPORTED_ENTRIES <= MAX_FLEET_EVENT_ENTRIES <= REPORTED_OBJECTS

# telemetry
MAX_LOG_LINES_WAITING = 10_000
MAX_TELEMETRY_REQUESTS_WAITING = 16_384  # of a rank, for a proxy to be told that they are stored
MAX_TELEMETRY_REQUESTS_PER_POST = 1024
TELEMETRY_POST_SECONDS = 2.0

# liveness
MIN_HEARTBEAT_SECONDS, MAX_HEARTBEAT_SECONDS = 0.05, 3600.0
HEARTBEAT_MISSES_BEFORE_LOST = 2

assert FRAME_HEADER_BYTES % FRAME_ALIGN_BYTES == 0
assert MAX_TOKENS_PER_SESSION * 4 + MAX_EXTRAS_PER_SESSION * 64 + MAX_IDENTITY_BYTES + MIB < MAX_MESSAGE_BYTES
assert MAX_SLOTS_PER_CALL * 8 + MAX_CHUNKS_PER_CALL * 32 + MIB < MAX_MESSAGE_BYTES
assert MAX_MESSAGE_BYTES * 2 < MAX_UNSENT_BYTES_PER_CONNECTION < MAX_UNSENT_BYTES
assert MAX_SLOTS_PER_CALL * 8 + MAX_CHUNKS_PER_CALL * 32 < MAX_RESERVATION_BYTES_PER_WORKER
assert MAX_CHANGES_PER_CALL + MAX_CHUNKS_ASKED_FOR <= MAX_CHUNKS_PER_CALL
assert MAX_SALTS_FOLLOWED <= MAX_CHUNKS_PER_CALL
assert MAX_NAMESPACES_PER_TENANT <= MAX_NAMESPACES_KEPT_PER_INSTANCE
assert FRAME_HEADER_BYTES < MAX_PAYLOAD_PART_BYTES < MAX_MESSAGE_BYTES
assert MAX_PAYLOAD_PART_BYTES <= PAYLOAD_WINDOW_BYTES <= MAX_PAYLOAD_BYTES_PER_WORKER // 2 <= MAX_PAYLOAD_BYTES

assert MAX_PEER_KEYS * 64 + MIB <= MAX_PEER_MESSAGE_BYTES and MAX_L2_BATCH_OBJECTS <= MAX_PEER_READ_KEYS
assert MAX_PEERS * (1 + MAX_PEER_READS) + MAX_PEER_HANDSHAKES <= MAX_PEER_CONNECTIONS
assert MAX_PEER_READS <= MAX_PEER_SENDS < PEER_SEND_THREADS and MAX_PEER_READS <= MAX_PEER_LOADS
assert L2_MAX_WAITS_IN_FLIGHT < MAX_PEER_LOOKUPS

# runtime plugins
MAX_RUNTIME_PLUGINS = 64
MAX_PLUGIN_LINE_BYTES = 4096  # that are logged of a line
MAX_PLUGIN_LINES_PER_SECOND = 200  # that are logged of one script
MAX_PLUGIN_BYTES_PER_SECOND = 4 * MIB  # that are read of one script; beyond, it waits for its pipe

# the audit log
MAX_AUDIT_LINES_WAITING = 10_000  # for a disk that stands still
MAX_AUDIT_TEXT_CHARACTERS = 4096  # of the detail, the caller or the outcome of a line
MAX_AUDIT_REFUSED_CHARACTERS = 256  # the same of a line for somebody who may not ask
MAX_AUDIT_REFUSALS_AT_ONCE = 100  # lines for those who may not ask; then one a second, which tells how many there were
