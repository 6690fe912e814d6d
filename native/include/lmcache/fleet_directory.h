// Which servers of a fleet have a copy of which object: soft state, told by the servers, thrown away and told again.
//
// A record is one copy: key, holder, size. The key of an object is a scope and a chunk hash; a scope is the name of a
// model, a rank, an object group and a salt, encoded by the caller, and a variant, the digest of the whole namespace
// where the teller names it. A holder is one life of a place; a place is a tier and a backend of a server. Records of a
// key are a list whose first one the table has.
//
// To void a holder makes all its records invisible in one step; `sweep` frees them a part at a time. A place that is
// told again has a new holder: what is told of it once more moves there, and what is not is gone when the old holder is
// voided.
//
// Invariants: a place has at most one visible record of a key; objects and bytes of a holder are those of its records;
// a scope is known while a record is in it. Thread-safe: one mutex, held for a bounded number of records.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "lmcache/key_hash.h"
#include "lmcache/limits.h"
#include "lmcache/mutex.h"

namespace lmcache {

inline constexpr std::uint32_t kNoRecord = ~std::uint32_t{0};

// The keys of one call: key i is in scopes[positions[i]] and has the 32 bytes of `hashes` from 32 i on.
struct FleetKeys {
    std::vector<std::string> scopes;  // as encoded, without a variant
    std::string variant;              // of all of them; only for what is told
    std::vector<std::uint32_t> positions;
    std::vector<std::uint8_t> hashes;

    std::size_t size() const { return positions.size(); }
    const std::uint8_t* hash(std::size_t i) const { return &hashes[i * kChunkHashBytes]; }
};

// Copies of objects as columns of one length (32 bytes each in `hashes`).
struct FleetPage {
    std::vector<std::string> scopes, variants;  // of one length: each scope that is here, once
    std::vector<std::uint32_t> positions;       // of each copy's scope in `scopes`
    std::vector<std::uint32_t> keys;            // of a lookup: which key it is of
    std::vector<std::uint8_t> hashes;
    std::vector<std::uint32_t> holders;
    std::vector<std::uint64_t> sizes_bytes;
    std::vector<std::uint32_t> access_counts;  // of the key
    std::uint32_t next_start = 0;              // of a listing; 0: that was the last page
};

struct FleetHolderStats {
    std::uint64_t objects = 0, bytes = 0;
};

struct FleetStats {
    std::uint64_t keys, records, void_records, scopes, holders, memory_bytes;
};

class FleetDirectory {
public:
    // Beyond `most_records` copies nothing is added.
    explicit FleetDirectory(std::uint64_t most_records);
    ~FleetDirectory();
    FleetDirectory(const FleetDirectory&) = delete;
    FleetDirectory& operator=(const FleetDirectory&) = delete;

    // A holder that has nothing. std::length_error beyond kMostHolders that live or are not yet swept.
    std::uint32_t add_holder(std::uint32_t place);
    // Its records are seen no more. A number is another holder's once they have been swept. Idempotent.
    void void_holder(std::uint32_t holder);
    FleetHolderStats holder_stats(std::uint32_t holder) const;

    // Copies that this holder has now; one of the same place becomes this holder's. How many of the keys it has then:
    // less than all only where the directory is full, or has too many scopes or variants.
    std::size_t store(std::uint32_t holder, const FleetKeys& keys, std::span<const std::uint64_t> sizes_bytes);
    // Copies that its place has no more: how many there were.
    std::size_t remove(std::uint32_t holder, const FleetKeys& keys);
    // Adds a use of each key: how many are known.
    std::size_t count_accesses(const FleetKeys& keys);

    // For each key, in any variant, at most `most_copies` visible copies.
    FleetPage lookup(const FleetKeys& keys, std::size_t most_copies) const;
    // Visible copies in the order of their records, from `start` (0: the first) on; at most `most`, among the next
    // `most_examined`. With `holders` those of these alone.
    FleetPage list(std::uint32_t start, std::size_t most, std::size_t most_examined,
                   std::span<const std::uint32_t> holders) const;
    // Bytes of the visible and void copies of each scope.
    FleetPage scopes() const;

    // Looks at the next `most_examined` records and frees those of void holders. Whether such records may be left.
    bool sweep(std::size_t most_examined);

    FleetStats stats() const;
    // Throws std::runtime_error that names the broken invariant. O(records).
    void check() const;

    static constexpr std::size_t kMostHolders = 65'535;
    static constexpr std::size_t kMostScopes = std::size_t{1} << 20;  // each with its variants
    static constexpr std::size_t kMostVariants = 64;                  // of a scope: a lookup goes through all of them

private:
    // 48 bytes.
    struct Record {
        std::array<std::uint8_t, kChunkHashBytes> hash;
        std::uint32_t scope;
        std::uint32_t next;  // record of the same key, or of the free list
        std::uint32_t size;  // see encode_size
        std::uint16_t holder;
        std::uint16_t accesses;  // of the key, in its first record; stays at the most
    };
    static_assert(sizeof(Record) == 48);
    static constexpr std::uint16_t kFreeRecord = 65'535;

    struct Holder {
        std::uint32_t place = 0;
        bool in_use = false, is_void = false;
        std::uint64_t objects = 0, bytes = 0;
    };

    struct Scope {
        const std::string* encoded = nullptr;
        std::string variant;
        std::uint64_t records = 0, bytes = 0;
    };

    // Record numbers by key, without the keys: a part of 4-byte slots each, which grows on its own.
    struct Part {
        std::unique_ptr<std::uint32_t[]> slots;
        std::uint32_t mask = 0;
        std::uint32_t count = 0;
    };

    static std::uint32_t encode_size(std::uint64_t size_bytes);
    static std::uint64_t decode_size(std::uint32_t size);

    Record& record(std::uint32_t index) const LMCACHE_REQUIRES(mutex_) {
        return blocks_[index >> kBlockBits][index & (kBlockRecords - 1)];
    }
    std::uint64_t hash_of(const Record& of) const { return hash_key_(of.scope, of.hash.data()); }
    Part& part_of(std::uint64_t hash) LMCACHE_REQUIRES(mutex_) { return parts_[hash >> 56]; }
    const Part& part_of(std::uint64_t hash) const LMCACHE_REQUIRES(mutex_) { return parts_[hash >> 56]; }

    std::uint32_t* find_slot(std::uint64_t hash, std::uint32_t scope, const std::uint8_t* chunk_hash) const
        LMCACHE_REQUIRES(mutex_);
    void insert(std::uint64_t hash, std::uint32_t index) LMCACHE_REQUIRES(mutex_);
    void erase(std::uint64_t hash, std::uint32_t* slot) LMCACHE_REQUIRES(mutex_);
    void grow(Part& part) LMCACHE_REQUIRES(mutex_);
    void prefetch_slot(std::uint64_t hash) const LMCACHE_REQUIRES(mutex_);
    void prefetch_record(std::uint64_t hash) const LMCACHE_REQUIRES(mutex_);

    std::uint32_t take_record() LMCACHE_REQUIRES(mutex_);
    // Takes it out of its list, and frees it. `slot` is where the table has the first one.
    void drop(std::uint64_t hash, std::uint32_t* slot, std::uint32_t previous, std::uint32_t index)
        LMCACHE_REQUIRES(mutex_);
    void charge(Record& of, std::uint16_t holder, std::uint32_t size) LMCACHE_REQUIRES(mutex_);
    void discharge(const Record& of) LMCACHE_REQUIRES(mutex_);
    // kNoRecord beyond a limit.
    std::uint32_t add_scope(const std::string& encoded, const std::string& variant) LMCACHE_REQUIRES(mutex_);
    void forget_scope(std::uint32_t number) LMCACHE_REQUIRES(mutex_);
    std::uint32_t known_scope(const std::string& encoded, const std::string& variant) const LMCACHE_REQUIRES(mutex_);
    template <typename Visit>
    void sweep_keys(const FleetKeys& keys, std::span<const std::uint32_t> scopes, Visit&& visit) const
        LMCACHE_REQUIRES(mutex_);
    const Holder& checked(std::uint32_t holder) const LMCACHE_REQUIRES(mutex_);

    static constexpr unsigned kBlockBits = 14;
    static constexpr std::uint32_t kBlockRecords = 1U << kBlockBits;

    mutable Mutex mutex_;
    KeyHash hash_key_;
    const std::uint64_t most_records_;
    std::vector<std::unique_ptr<Record[]>> blocks_ LMCACHE_GUARDED_BY(mutex_);
    std::uint32_t end_ LMCACHE_GUARDED_BY(mutex_) = 0;  // records are below
    std::uint32_t free_ LMCACHE_GUARDED_BY(mutex_) = kNoRecord;
    std::uint64_t records_ LMCACHE_GUARDED_BY(mutex_) = 0;
    std::uint64_t void_records_ LMCACHE_GUARDED_BY(mutex_) = 0;
    std::uint64_t keys_ LMCACHE_GUARDED_BY(mutex_) = 0;
    std::uint32_t sweep_at_ LMCACHE_GUARDED_BY(mutex_) = 0;
    std::array<Part, 256> parts_ LMCACHE_GUARDED_BY(mutex_);
    std::vector<Holder> holders_ LMCACHE_GUARDED_BY(mutex_);
    std::vector<std::uint32_t> free_holders_ LMCACHE_GUARDED_BY(mutex_);
    std::vector<Scope> scopes_ LMCACHE_GUARDED_BY(mutex_);
    std::vector<std::uint32_t> free_scopes_ LMCACHE_GUARDED_BY(mutex_);
    std::unordered_map<std::string, std::vector<std::uint32_t>> scopes_of_
        LMCACHE_GUARDED_BY(mutex_);  // variants by encoded scope
    std::uint64_t scope_bytes_ LMCACHE_GUARDED_BY(mutex_) = 0;
};

}  // namespace lmcache
