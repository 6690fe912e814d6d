// The L1 tier's state: which objects are where in the arena, who reads and who writes them, and what goes first when
// room is needed. Thread-safe: one mutex, held for the length of a call. It never touches the slots that it hands out;
// with a slot table it writes down there what it has handed out, for the next server.
//
//   absent --reserve--> staged --commit--> resident --evict, remove, clear--> absent
//                         |                   |  clear while leased --> detached --last release--> absent
//                         |--abort, drop_owner--> absent
//                         `--expire--> quarantined --abort, drop_owner--> absent
//
// Callers name namespaces by their digests. Those that have no object are not known here, and nothing is kept of them.
// Arrays over (namespace, chunk) are ordered [namespace][chunk].
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lmcache/age_samples.h"
#include "lmcache/arena.h"
#include "lmcache/claim_table.h"
#include "lmcache/courteous_mutex.h"
#include "lmcache/eviction_order.h"
#include "lmcache/key_table.h"
#include "lmcache/left_frames.h"
#include "lmcache/limits.h"
#include "lmcache/namespaces.h"
#include "lmcache/object_pool.h"
#include "lmcache/slot_table.h"

namespace lmcache {

using NamespaceDigests = std::span<const Digest>;
using Hashes = std::span<const std::uint8_t>;  // kChunkHashBytes each
// For each namespace, of how many chunks at the end of a prefix it must have an object; 0: of all. Empty: all of all.
using Tails = std::span<const std::uint32_t>;

struct L1Options {
    std::uint64_t capacity_bytes = 0;  // rounded down to the alignment
    std::uint64_t first_offset = 0;    // a multiple of the alignment
    std::uint64_t align_bytes = 0;     // a power of two
    EvictionPolicy policy = EvictionPolicy::kLru;
    std::uintptr_t slot_table = 0;  // one word a unit, in memory that outlives the process; 0: nothing is kept
    double (*now)() = steady_seconds;
};

struct Acquired {
    std::uint64_t lease = 0;
    std::size_t chunks = 0;
    std::vector<std::uint64_t> offsets;
};

struct Reserved {
    std::uint64_t reservation = 0;
    std::vector<std::uint64_t> offsets;
    std::size_t chunks_without_room = 0;
};

// Whether reading counts as a use by which objects are kept longer. What only copies objects elsewhere is no user.
enum class Reading : bool { kUse, kCopy };

struct CommitRecord {
    std::uint64_t name_space;  // position among those of the reservation
    std::uint64_t chunk;
    std::uint64_t offset;
    std::uint64_t size_bytes;
};
static_assert(sizeof(CommitRecord) == 32);

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

struct Adopted {
    std::size_t objects = 0;
    std::uint64_t size_bytes = 0;
    std::size_t refused = 0;  // words that were no slot's, frames that do not verify or have no namespace here
    std::vector<std::pair<Owner, std::uint64_t>> set_aside;  // owners, and the quarantined reservations made for them
    std::uint64_t set_aside_bytes = 0;
};

struct ObjectPage {
    std::vector<Digest> namespaces;
    std::vector<std::uint32_t> positions;  // of each object's namespace in `namespaces`
    std::vector<std::uint8_t> hashes;
    std::vector<std::uint64_t> sizes_bytes;
    std::uint32_t next_start = 0;  // 0: that was the last page
};

// A salt that stored, or wanted to store, beyond its limit.
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

    // Ends it before its memory goes: waits for the call that is under way; from then on every method throws Closed and
    // nothing touches the slot table. Idempotent.
    void close() { mutex_.close(); }

    void set_committed(std::uint64_t committed_bytes);

    // Takes over, into an empty core, what a former life left in the memory of this core's slot table. `salts` are
    // those of `left.namespaces`, nothing where one is not to be adopted. Slots of `live_owners` are quarantined until
    // abort or drop_owner; those of others are free, as nobody writes there any more.
    Adopted adopt(const LeftFrames& left, std::span<const std::optional<std::string>> salts,
                  std::span<const Owner> live_owners);

    std::size_t probe(NamespaceDigests namespaces, Hashes hashes);
    std::size_t touch(NamespaceDigests namespaces, Hashes hashes, Tails tails = {});
    // Where a namespace has a tail, only that is leased; offsets before it are kNoSlot.
    Acquired acquire(Owner owner, NamespaceDigests namespaces, Hashes hashes, double deadline,
                     Reading reading = Reading::kUse, Tails tails = {});
    bool release(std::uint64_t lease);
    std::size_t renew(Owner owner, double deadline);

    // `salt` is that of all the namespaces. `wanted`: one byte for each namespace and chunk, 0 where no slot is wanted;
    // empty: all are.
    Reserved reserve(Owner owner, NamespaceDigests namespaces, std::string_view salt,
                     std::span<const std::uint64_t> sizes_bytes, Hashes hashes, double deadline,
                     std::span<const std::uint8_t> wanted = {});
    Committed commit(std::uint64_t reservation, std::span<const std::uint8_t> written, const CommitOptions& options);
    bool abort(std::uint64_t reservation);
    // The writer is late: its keys are free for others, its memory when it ends the reservation. False if unknown.
    bool quarantine(std::uint64_t reservation);

    std::pair<std::size_t, std::size_t> expire(double now);
    std::pair<std::size_t, std::size_t> drop_owner(Owner owner);

    std::size_t make_permanent(NamespaceDigests namespaces, Hashes hashes);
    Removed evict(std::uint64_t target_bytes);
    // Under IsolatedLRU: how much the objects of a salt may keep; 0 for a salt without a limit. What they take beyond
    // goes first, also inline, and never makes a salt within its limit lose anything.
    void set_limit(std::string_view salt, std::uint64_t limit_bytes);
    // Evicts what salts have above their limits, as far as nobody reads it. With `spare_new` not what became resident
    // since the last such call, so that there is time to copy it elsewhere.
    Removed enforce_limits(bool spare_new = false);
    // Salts that went beyond their limits since the last call, each once for as long as it has objects.
    std::vector<Overuse> take_overuses();
    std::size_t remove(NamespaceDigests namespaces, Hashes hashes);
    Removed clear();

    // Which part of the objects is watched for `take_ages`, from 0 to 1. Those that are resident already are not.
    void set_age_sample_rate(double rate);
    // How old watched objects were when they were used again or evicted, since the last call.
    Ages take_ages();

    ObjectPage list_objects(std::uint32_t start, std::size_t count);
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

    // Private methods expect mutex_ to be held.
    std::uint64_t hash_key(std::uint32_t name_space, const std::uint8_t* hash) const;
    std::uint64_t hash_object(const Object& object) const { return hash_key(object.name_space, object.hash.data()); }
    std::uint32_t find(std::uint64_t key_hash, std::uint32_t name_space, const std::uint8_t* hash) const;
    static void check_tails(NamespaceDigests namespaces, Tails tails);
    static void check_product(NamespaceDigests namespaces, Hashes hashes);
    // The numbers of namespaces, kNoNamespace for one without objects.
    std::vector<std::uint32_t> numbers_of(NamespaceDigests namespaces) const;
    // Calls visit(index) for each pair that is resident.
    template <typename Visit>
    void for_each_resident(NamespaceDigests namespaces, Hashes hashes, Visit&& visit);

    // Visits keys one after the other while the next ones are already on their way from memory.
    // visit(chunk, position in namespaces, key hash, pointer to the chunk hash) -> go on?
    template <typename Visit>
    void sweep(NamespaceNumbers namespaces, Hashes hashes, Visit&& visit) const;
    // Indexes of the longest prefix of chunks that is resident wherever there is no tail, [chunk][namespace]; kNoObject
    // where one with a tail has nothing.
    std::vector<std::uint32_t> resident_prefix(NamespaceDigests namespaces, Hashes hashes, Tails tails) const;
    // Shortens that to the longest prefix whose tails are whole, and forgets what lies before the tails.
    static void keep_tails(std::vector<std::uint32_t>& indexes, Tails tails);

    std::uint32_t stage(Owner owner, std::uint64_t key_hash, std::uint32_t name_space, const std::uint8_t* hash,
                        std::uint32_t units);
    bool adopt_frame(const LeftFrame& frame, const Digest& digest, std::string_view salt);
    void set_aside(const LeftFrames& left, std::span<const Owner> live_owners, Adopted& adopted);
    // An extent of that size for that object, after evicting what has to go for it, or nothing.
    std::optional<std::uint32_t> allocate(std::uint32_t units, std::uint32_t index, std::uint32_t name_space);
    void note_overuse(std::uint32_t name_space);
    // An object of the namespace has memory from now on, and has none any more.
    void charge(std::uint32_t name_space, std::uint32_t units);
    void discharge(std::uint32_t name_space, std::uint32_t units);
    // A run of free extents and evictable objects side by side, at least as long as asked for.
    struct Window {
        std::vector<std::uint32_t> objects;
        std::uint32_t youngest = kNoObject;
    };
    std::optional<Window> window_around(std::uint32_t index, std::uint32_t units) const;
    std::optional<Window> best_window(std::uint32_t oldest, std::uint32_t units) const;
    bool is_evictable(std::uint32_t index) const;
    // Fetches what evicting it and the next ones will read.
    void prefetch_eviction(std::uint32_t index) const;
    void count_eviction(std::uint32_t index);
    // The object is the most recently used of its queue from now on. It must be resident.
    void make_newest(std::uint32_t index);
    std::uint32_t evict_one(std::uint32_t index);
    // Evicts what `next` names, until it names nobody or enough is freed.
    template <typename Next>
    Removed evict_while(std::uint64_t target_bytes, Next&& next);
    // Frees an object's memory and forgets it.
    void erase(std::uint32_t index);
    // Takes an object out of every structure but the arena.
    void forget(std::uint32_t index);
    void hold(std::uint32_t index, Reading reading);
    void let_go(std::uint32_t index, Reading reading);
    void end_lease(std::uint64_t id);
    void end_reservation(std::uint64_t id);
    void quarantine(Reservation& reservation);

    std::uint64_t offset_of(const Object& object) const;
    std::uint64_t bytes(std::uint64_t units) const { return units * options_.align_bytes; }

    CourteousMutex mutex_;
    L1Options options_;
    std::array<std::uint64_t, 4> seeds_;  // nobody can choose keys that collide
    Arena arena_;                         // its tenants are indexes of objects
    SlotTable slots_;                     // its resident words are the permanent resident objects
    ObjectPool objects_;
    KeyTable keys_;
    Namespaces namespaces_;
    EvictionOrder order_;
    AgeSamples ages_;
    std::vector<Overuse> overuses_;
    std::uint8_t cycle_ = 0;  // of keeping limits
    ClaimTable<Lease> leases_;
    ClaimTable<Reservation> reservations_;
    std::size_t resident_ = 0;
    std::size_t staged_ = 0;
    std::size_t leased_objects_ = 0;
    std::uint64_t quarantined_units_ = 0;
    std::uint64_t evicted_objects_ = 0;
    std::uint64_t evicted_units_ = 0;
    std::uint64_t allocation_failures_ = 0;  // chunks
};

}  // namespace lmcache
