// The state of the L1 tier: where each object lies in the arena, who reads or writes it, and the order of eviction.
// Thread-safe: one mutex, held for the length of a call. Slots are never touched here; a slot table, if there is one,
// records them for the next server.
//
//   absent --reserve--> staged --commit--> resident --evict, remove, clear--> absent
//                         |                   |  clear while leased --> detached --last release--> absent
//                         |--abort, drop_owner--> absent
//                         `--expire--> quarantined --abort, drop_owner--> absent
//
// Callers name namespaces by their digests. Nothing is kept of a namespace without objects.
// Arrays over (namespace, chunk) are ordered [namespace][chunk].
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lmcache/age_samples.h"
#include "lmcache/arena.h"
#include "lmcache/change_log.h"
#include "lmcache/claim_table.h"
#include "lmcache/eviction/ghosts.h"
#include "lmcache/eviction/order.h"
#include "lmcache/key_hash.h"
#include "lmcache/key_table.h"
#include "lmcache/limits.h"
#include "lmcache/namespaces.h"
#include "lmcache/object_pool.h"
#include "lmcache/recovered_frames.h"
#include "lmcache/slot_table.h"
#include "lmcache/tails.h"
#include "lmcache/yielding_mutex.h"

namespace lmcache {

using NamespaceDigests = std::span<const Digest>;
using Hashes = std::span<const std::uint8_t>;  // kChunkHashBytes each

struct L1Options {
    std::uint64_t capacity_bytes = 0;  // rounded down to the alignment
    std::uint64_t first_offset = 0;    // a multiple of the alignment
    std::uint64_t align_bytes = 0;     // a power of two
    EvictionPolicy policy = EvictionPolicy::kLru;
    std::uintptr_t slot_table = 0;  // one word a unit, in memory that outlives the process; 0: nothing is kept
    double (*now)() = steady_seconds;
};

struct Acquired {
    std::uint64_t lease = 0;  // 0: nothing was there
    std::size_t chunks = 0;
    std::vector<std::uint64_t> slots;  // offsets in the arena, kNoSlot where there is none
};

struct Reserved {
    std::uint64_t reservation = 0;  // 0: no slot was handed out
    std::vector<std::uint64_t> slots;
    std::size_t chunks_without_room = 0;
};

// Whether reading counts as a use, which keeps objects longer. Copying them to another tier does not.
enum class Reading : bool { kUse, kCopy };

struct CommitRecord {
    std::uint32_t name_space;  // position among those of the reservation
    std::uint32_t chunk;
    std::uint64_t slot;
    std::uint64_t size_bytes;
};

struct Committed {
    std::uint64_t lease = 0;
    std::vector<CommitRecord> records;  // in chunk order
};

struct CommitOptions {
    Owner lease_owner = 0;  // 0: no lease
    double deadline = 0;
    bool temporary = false;
};

struct Removed {
    std::size_t objects = 0;
    std::uint64_t size_bytes = 0;
};

// Why a key that once was asked for, reserved or resident is not resident now. The latest kFatesKept are remembered, as
// fingerprints: a key that was never here has one with a chance of kFatesKept in 2^32, which is 1 in 8,192.
enum class Fate : std::uint8_t {
    kUnknown,      // never here, or forgotten
    kEvicted,      // to make room
    kOverQuota,    // while its salt had more than its limit
    kCleared,      // by an operator
    kAbandoned,    // its writer vanished before the commit
    kNoRoom,       // no slot could be had for it
    kCorrupt,      // it did not verify
    kBeingStored,  // reserved, not committed yet
};
inline constexpr std::size_t kFatesKept = std::size_t{1} << 19;

// Leases and reservations that a call ended (or, of reservations, quarantined).
struct EndedClaims {
    std::size_t leases = 0;
    std::size_t reservations = 0;

    bool operator==(const EndedClaims&) const = default;
};

// An owner of the previous server that may still write, and the reservation that holds its slots.
struct QuarantinedOwner {
    Owner owner;
    std::uint64_t reservation;
};

struct Recovered {
    std::size_t objects = 0;
    std::uint64_t size_bytes = 0;
    std::size_t refused = 0;  // words that describe no slot, frames whose header or namespace is wrong
    std::vector<QuarantinedOwner> quarantined;
    std::uint64_t quarantined_bytes = 0;
};

struct ObjectPage {
    std::vector<Digest> namespaces;
    std::vector<std::uint32_t> positions;  // of each object's namespace in `namespaces`
    std::vector<std::uint8_t> hashes;
    std::vector<std::uint64_t> sizes_bytes;
    std::uint32_t next_start = 0;  // 0: that was the last page
};

// A salt that stored, or had no room to store, beyond its limit.
struct Overuse {
    std::string salt;
    std::uint64_t limit_bytes;
};

struct L1Stats {
    std::uint64_t capacity_bytes, committed_bytes, used_bytes, free_bytes, largest_free_bytes, above_limits_bytes;
    std::uint64_t objects, staged, leases, leased_objects, reservations, quarantined_bytes;
    std::uint64_t evicted_objects, evicted_bytes, allocation_failures, index_bytes;
    std::uint64_t namespaces, salts;
};

class L1Core {
public:
    // std::invalid_argument with a sentence on bad options; so do all methods on bad arguments.
    explicit L1Core(const L1Options& options);

    // To be called before the memory is unmapped: waits for the call under way. From then on every method throws Closed
    // and nothing touches the slot table. Idempotent.
    void close() { mutex_.close(); }

    void set_committed(std::uint64_t committed_bytes);

    // Fills an empty core with the frames of the previous server in the memory of this core's slot table. `salts` are
    // those of `found.namespaces`, nullopt where a namespace is to be dropped. Uncommitted slots of `live_owners` are
    // quarantined until abort or drop_owner; those of other owners are free, since nobody writes there any more.
    Recovered recover(const RecoveredFrames& found, std::span<const std::optional<std::string>> salts,
                      std::span<const Owner> live_owners);

    std::size_t probe(NamespaceDigests namespaces, Hashes hashes);
    std::size_t touch(NamespaceDigests namespaces, Hashes hashes, Tails tails = {});
    // Where a namespace has a tail, only that is leased; slots before it are kNoSlot.
    Acquired acquire(Owner owner, NamespaceDigests namespaces, Hashes hashes, double deadline,
                     Reading reading = Reading::kUse, Tails tails = {});
    // Pairs (namespaces[i], hashes[i]): leases those that are resident, as one, for a copy. `chunks` counts them.
    Acquired acquire_each(Owner owner, NamespaceDigests namespaces, Hashes hashes, double deadline);
    // For each pair 1 if it is resident, else 0.
    std::vector<std::uint8_t> resident_each(NamespaceDigests namespaces, Hashes hashes);
    // Pairs: those that would go with their last lease stay. How many are resident.
    std::size_t retain(NamespaceDigests namespaces, Hashes hashes);
    bool release(std::uint64_t lease);
    std::size_t renew(Owner owner, double deadline);

    // `salt` is that of all the namespaces. `wanted`: one byte for each namespace and chunk, 0 where no slot is wanted;
    // empty: all are.
    Reserved reserve(Owner owner, NamespaceDigests namespaces, std::string_view salt,
                     std::span<const std::uint64_t> sizes_bytes, Hashes hashes, double deadline,
                     std::span<const std::uint8_t> wanted = {});
    Committed commit(std::uint64_t reservation, std::span<const std::uint8_t> written, const CommitOptions& options);
    bool abort(std::uint64_t reservation);
    // For a writer that is late: its keys are free at once, its memory with abort or drop_owner. False if unknown.
    bool quarantine(std::uint64_t reservation);

    EndedClaims expire(double now);
    EndedClaims drop_owner(Owner owner);

    Removed evict(std::uint64_t target_bytes);
    // Under IsolatedLRU: the bytes that objects of a salt may keep; 0 for a salt without a limit. What exceeds it is
    // evicted first, and never costs a salt within its limit anything.
    void set_limit(std::string_view salt, std::uint64_t limit_bytes);
    // Evicts what salts have above their limits, as far as nobody reads it. With `spare_new` not what became resident
    // since the last such call, so that there is time to copy it elsewhere.
    Removed enforce_limits(bool spare_new = false);
    // Salts that went beyond their limits since the last call, each once for as long as it has objects.
    std::vector<Overuse> take_overuses();
    // The fate of the first object of a chunk that is not resident and has one.
    Fate fate_of(NamespaceDigests namespaces, const std::uint8_t* hash);
    // `fate` is what is remembered of them; kUnknown: nothing.
    std::size_t remove(NamespaceDigests namespaces, Hashes hashes, Fate fate = Fate::kUnknown);
    // What `spared_owner` leases stays as it is; 0: nobody is spared.
    Removed clear(Owner spared_owner = 0);

    // The fraction of objects stored from now on that is sampled for `take_ages`, from 0 to 1.
    void set_age_sample_rate(double rate);
    // Ages of sampled objects at use and at eviction since the last call.
    Ages take_ages();

    // In the order of their records, from `start` on: a record keeps its place for as long as the object stays. At most
    // so many records are looked at, so that a page may be short, or empty, and not the last one.
    ObjectPage list_objects(std::uint32_t start, std::size_t count,
                            std::size_t most_examined = std::numeric_limits<std::size_t>::max());

    // Which objects became resident and which left, in order, while somebody watches (change_log.h). `watch_changes`
    // gives the cursor from which on this reader can read.
    std::uint64_t watch_changes();
    void unwatch_changes();
    ChangePage changes(std::uint64_t cursor, std::size_t most);
    // For each chunk 1 if it is resident in every namespace, else 0.
    std::vector<std::uint8_t> resident_in_all(NamespaceDigests namespaces, Hashes hashes);

    L1Stats stats();
    std::uint64_t usage_of(std::string_view salt);
    std::vector<std::pair<std::string, std::uint64_t>> salt_usage();
    void check();

private:
    using NamespaceNumbers = std::span<const std::uint32_t>;

    struct Lease : Claim {
        std::size_t chunks = 0;
        Reading reading = Reading::kUse;
        std::vector<std::uint32_t> objects;  // [namespace][chunk], kNoObject where there is none
    };
    struct Reservation : Claim {
        std::size_t chunks = 0;
        std::vector<std::uint32_t> objects;  // [namespace][chunk], kNoObject where no slot was handed out
        bool quarantined = false;
    };

    std::uint64_t hash_object(const Object& object) const { return hash_key_(object.name_space, object.hash.data()); }
    std::uint32_t find(std::uint64_t key_hash, std::uint32_t name_space, const std::uint8_t* hash) const
        LMCACHE_REQUIRES(mutex_);
    static void check_tails(NamespaceDigests namespaces, Tails tails);
    static void check_product(NamespaceDigests namespaces, Hashes hashes);
    // The numbers of namespaces, kNoNamespace for one without objects.
    std::vector<std::uint32_t> numbers_of(NamespaceDigests namespaces) const LMCACHE_REQUIRES(mutex_);
    // Calls visit(pair, index) for each pair that is resident.
    template <typename Visit>
    void for_each_resident(NamespaceDigests namespaces, Hashes hashes, Visit&& visit) LMCACHE_REQUIRES(mutex_);

    // Visits keys in order and prefetches the next ones meanwhile.
    // visit(chunk, position in namespaces, key hash, pointer to the chunk hash) returns false to stop.
    template <typename Visit>
    void sweep(NamespaceNumbers namespaces, Hashes hashes, Visit&& visit) const LMCACHE_REQUIRES(mutex_);
    // Indexes of the longest prefix of chunks that is resident wherever there is no tail, [chunk][namespace]; kNoObject
    // where one with a tail has nothing.
    std::vector<std::uint32_t> resident_prefix(NamespaceDigests namespaces, Hashes hashes, Tails tails) const
        LMCACHE_REQUIRES(mutex_);
    // Shortens that to the longest usable prefix (tails.h) and drops what lies before the tails.
    static void keep_tails(std::vector<std::uint32_t>& indexes, Tails tails);

    std::uint32_t stage(Owner owner, std::uint64_t key_hash, std::uint32_t name_space, const std::uint8_t* hash,
                        std::uint32_t units) LMCACHE_REQUIRES(mutex_);
    bool recover_frame(const RecoveredFrame& frame, const Digest& digest, std::string_view salt)
        LMCACHE_REQUIRES(mutex_);
    void quarantine_uncommitted(const RecoveredFrames& found, std::span<const Owner> live_owners, Recovered& recovered)
        LMCACHE_REQUIRES(mutex_);
    // An extent for that object, after evicting what is needed for it; nullopt where there is no room.
    std::optional<std::uint32_t> allocate(std::uint32_t units, std::uint32_t index, std::uint32_t name_space)
        LMCACHE_REQUIRES(mutex_);
    void note_overuse(std::uint32_t name_space) LMCACHE_REQUIRES(mutex_);
    // Count the memory that an object of the namespace takes, or took.
    void charge(std::uint32_t name_space, std::uint32_t units) LMCACHE_REQUIRES(mutex_);
    void discharge(std::uint32_t name_space, std::uint32_t units) LMCACHE_REQUIRES(mutex_);
    // Adjacent free extents and evictable objects, together as long as asked for.
    struct Window {
        std::vector<std::uint32_t> objects;
        std::uint32_t youngest = kNoObject;
    };
    std::optional<Window> window_around(std::uint32_t index, std::uint32_t units) const LMCACHE_REQUIRES(mutex_);
    std::optional<Window> best_window(std::uint32_t oldest, std::uint32_t units) const LMCACHE_REQUIRES(mutex_);
    bool is_evictable(std::uint32_t index) const LMCACHE_REQUIRES(mutex_);
    // Prefetches what evicting it and the next ones will read.
    void prefetch_eviction(std::uint32_t index) const LMCACHE_REQUIRES(mutex_);
    void count_eviction(std::uint32_t index) LMCACHE_REQUIRES(mutex_);
    std::uint64_t fate_key(const Digest& digest, const std::uint8_t* hash) const;
    void note_fate(std::uint32_t index, Fate fate) LMCACHE_REQUIRES(mutex_);
    // To be called when it has become resident, and before it ceases to be.
    void note_change(std::uint32_t index, bool added) LMCACHE_REQUIRES(mutex_) {
        if (!changes_.watched()) return;
        const Object& object = objects_[index];
        changes_.add(namespaces_.digest_of(object.name_space), object.hash, bytes(object.units), added);
    }
    void note_abandoned(const Reservation& reservation) LMCACHE_REQUIRES(mutex_);
    // Makes a resident object the most recently used of its queue.
    void make_newest(std::uint32_t index) LMCACHE_REQUIRES(mutex_);
    std::uint32_t evict_one(std::uint32_t index) LMCACHE_REQUIRES(mutex_);
    // Evicts the victims that `next` returns, until it returns kNoObject or enough is freed.
    template <typename Next>
    Removed evict_while(std::uint64_t target_bytes, Next&& next) LMCACHE_REQUIRES(mutex_);
    // Removes an object and frees its memory.
    void erase(std::uint32_t index) LMCACHE_REQUIRES(mutex_);
    // Removes an object from every structure but the arena.
    void forget(std::uint32_t index) LMCACHE_REQUIRES(mutex_);
    void hold(std::uint32_t index, Reading reading) LMCACHE_REQUIRES(mutex_);
    void let_go(std::uint32_t index, Reading reading) LMCACHE_REQUIRES(mutex_);
    void end_lease(std::uint64_t id) LMCACHE_REQUIRES(mutex_);
    void end_reservation(std::uint64_t id) LMCACHE_REQUIRES(mutex_);
    void quarantine(Reservation& reservation) LMCACHE_REQUIRES(mutex_);

    std::uint64_t offset_of(const Object& object) const LMCACHE_REQUIRES(mutex_);
    std::uint64_t bytes(std::uint64_t units) const { return units * options_.align_bytes; }

    YieldingMutex mutex_;
    L1Options options_;
    KeyHash hash_key_;
    Arena arena_ LMCACHE_GUARDED_BY(mutex_);      // its tenants are indexes of objects
    SlotTable slots_ LMCACHE_GUARDED_BY(mutex_);  // its resident words are the permanent resident objects
    ObjectPool objects_ LMCACHE_GUARDED_BY(mutex_);
    KeyTable keys_ LMCACHE_GUARDED_BY(mutex_);
    Namespaces namespaces_ LMCACHE_GUARDED_BY(mutex_);
    EvictionOrder order_ LMCACHE_GUARDED_BY(mutex_);
    AgeSamples ages_ LMCACHE_GUARDED_BY(mutex_);
    Ghosts fates_ LMCACHE_GUARDED_BY(mutex_);
    ChangeLog changes_ LMCACHE_GUARDED_BY(mutex_);
    std::vector<Overuse> overuses_ LMCACHE_GUARDED_BY(mutex_);
    std::uint8_t cycle_ LMCACHE_GUARDED_BY(mutex_) = 0;  // calls of enforce_limits(spare_new)
    ClaimTable<Lease> leases_ LMCACHE_GUARDED_BY(mutex_);
    ClaimTable<Reservation> reservations_ LMCACHE_GUARDED_BY(mutex_);
    std::size_t resident_ LMCACHE_GUARDED_BY(mutex_) = 0;
    std::size_t staged_ LMCACHE_GUARDED_BY(mutex_) = 0;
    std::size_t leased_objects_ LMCACHE_GUARDED_BY(mutex_) = 0;
    std::uint64_t quarantined_units_ LMCACHE_GUARDED_BY(mutex_) = 0;
    std::uint64_t evicted_objects_ LMCACHE_GUARDED_BY(mutex_) = 0;
    std::uint64_t evicted_units_ LMCACHE_GUARDED_BY(mutex_) = 0;
    std::uint64_t allocation_failures_ LMCACHE_GUARDED_BY(mutex_) = 0;  // chunks
};

}  // namespace lmcache
