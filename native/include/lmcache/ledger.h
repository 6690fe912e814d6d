// What an L2 adapter holds, in bytes, and in which order it may go.
//
//   absent --stored, found--> resident --victims--> leaving --evicted--> absent
//                                |                     `--not_evicted--> resident
//                                `--lost--> absent, or detached until nobody reads it any more
//
// Keys of a call are in prefix order: the suffix of a prompt is of no use without its prefix, so the last one goes
// first.
//
// Invariants: used bytes are the charges of what is resident or leaving; reserved bytes are those of stores under way;
// a folder counts while one of either needs it. Thread-safe: one mutex, held for the length of a call. A call's time
// depends on its keys, not on how many objects there are.
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

#include "lmcache/change_log.h"
#include "lmcache/eviction/order.h"
#include "lmcache/folder_count.h"
#include "lmcache/key_hash.h"
#include "lmcache/key_table.h"
#include "lmcache/limits.h"
#include "lmcache/mutex.h"
#include "lmcache/namespaces.h"
#include "lmcache/object_pool.h"

namespace lmcache {

// The keys of one call: key i is of namespaces[positions[i]] and has the 32 bytes of `hashes` from 32 i on. The
// namespaces are distinct.
struct LedgerKeys {
    struct Namespace {
        Digest digest;
        std::string salt;     // these two are kept with the namespace's first object; calls that only ask, or that
        std::string encoded;  // name a known namespace, need not say them
    };
    std::vector<Namespace> namespaces;
    std::vector<std::uint32_t> positions;
    std::vector<std::uint8_t> hashes;

    std::size_t size() const { return positions.size(); }
    const std::uint8_t* hash(std::size_t i) const { return &hashes[i * kChunkHashBytes]; }
};

// Some objects: `namespaces` as they were encoded, the rest as columns of one length (32 bytes each in `hashes`).
struct LedgerPage {
    std::vector<std::string> namespaces;
    std::vector<std::uint32_t> positions;  // of each object's namespace in `namespaces`
    std::vector<std::uint8_t> hashes;
    std::vector<std::uint64_t> charges_bytes;
    std::uint32_t next_start = 0;  // 0: that was the last page
};

// Folders of a namespace, a bit each: that of the hashes with this first byte.
struct NamespaceFolders {
    Digest digest;
    std::array<std::uint8_t, 32> first_bytes;

    bool contains(std::uint8_t first_byte) const { return (first_bytes[first_byte / 8] >> first_byte % 8 & 1) != 0; }
};

struct LedgerCapacity {
    std::optional<std::uint64_t> limit_bytes;
    std::uint64_t unit_bytes = 1;             // an object is charged its size rounded up to this ...
    std::uint64_t object_overhead_bytes = 0;  // ... plus this
    std::uint64_t folder_bytes = 0;           // 0: there are no folders
};

struct LedgerStats {
    std::uint64_t objects, used_bytes, reserved_bytes, folders, leaving_objects, read_objects, namespaces, memory_bytes;
};

enum class Known : std::uint8_t { kNo, kYes, kLeaving };

// What one reader holds, until it is let go.
class LedgerHold {
    friend class Ledger;
    std::vector<std::uint32_t> objects_;
};

class Ledger {
public:
    explicit Ledger(EvictionPolicy policy) : order_(policy, objects_, namespaces_) {}

    // Charges computed before stay. std::invalid_argument where folders would begin or cease to count with objects
    // there.
    void set_capacity(const LedgerCapacity& capacity);
    // Under IsolatedLRU: bytes of a salt; 0: no limit. Only the ratios count.
    void set_limit(std::string_view salt, std::uint64_t limit_bytes);

    // Whether something refers to that namespace.
    bool knows(const Digest& digest) const;
    std::vector<Known> known(const LedgerKeys& keys) const;
    // For each key 1 if somebody holds it, else 0.
    std::vector<std::uint8_t> held(const LedgerKeys& keys) const;
    // The namespaces of what is known, as they were encoded.
    std::vector<std::string> namespaces() const;
    // Objects that were just stored; the youngest from now on. One that was leaving is resident again. The bytes that
    // these keys are charged.
    std::uint64_t stored(const LedgerKeys& keys, std::span<const std::uint64_t> sizes_bytes);
    // Objects that the backend holds, youngest first, all older than whatever is known, or all `newer`. Known ones are
    // left as they are, but where a scan that has not seen one finds it of another size: it is charged that, as one of
    // the youngest.
    void found(const LedgerKeys& keys, std::span<const std::uint64_t> sizes_bytes, bool newer = false);
    // They were used by a request. How many are known.
    std::size_t touch(const LedgerKeys& keys);
    // They are gone without having been evicted.
    void lost(const LedgerKeys& keys);

    // Who goes next, until they have `wanted_bytes` or are `most`: leaving from now on, still loadable and charged, and
    // no victims again, until `evicted` or `not_evicted`.
    LedgerPage victims(std::uint64_t wanted_bytes, std::size_t most);
    // Those of the keys that are leaving have gone (the bytes that they were charged), or stay in their previous
    // places.
    std::uint64_t evicted(const LedgerKeys& keys);
    void not_evicted(const LedgerKeys& keys);

    // Those that are known are no victims until they are let go.
    LedgerHold hold(const LedgerKeys& keys);
    void let_go(LedgerHold& hold);

    // How many bytes must go before these keys, charged that much, may be stored beside `other_bytes`.
    std::uint64_t lacking(const LedgerKeys& keys, std::uint64_t charge_bytes, std::uint64_t other_bytes) const;
    // For a store of these keys, and for their folders. Given back with the same keys.
    void reserve(const LedgerKeys& keys, std::uint64_t charge_bytes);
    void give_back(const LedgerKeys& keys, std::uint64_t charge_bytes);

    // Begins a scan of the backend: objects that are stored or found from now on have been seen by it.
    std::uint8_t begin_scan();
    // The scan that began last has seen those that are known of these.
    void see(const LedgerKeys& keys);
    // Known objects in the order of their records, from `start` (0: the first) on; stores meanwhile may be missed.
    // `unseen_by`: only those that this scan has not seen, if it is among the last 255. `passed_over`: folders whose
    // objects are left out, and count as seen by the youngest scan.
    LedgerPage list(std::uint32_t start, std::size_t most, std::optional<std::uint8_t> unseen_by,
                    std::span<const NamespaceFolders> passed_over = {});

    // What became known, or is charged otherwise, and what is known no longer, as in L1Core.
    std::uint64_t watch_changes();
    void unwatch_changes();
    ChangePage changes(std::uint64_t cursor, std::size_t most) const;
    // For each chunk 1 if it is known in every namespace, else 0.
    std::vector<std::uint8_t> known_in_all(std::span<const Digest> namespaces,
                                           std::span<const std::uint8_t> hashes) const;

    LedgerStats stats() const;
    // Throws std::runtime_error that names the broken invariant. O(objects).
    void check() const;

private:
    class References;
    class PageBuilder;

    // kMaxCharge at most: an adapter may find a sparse file of any size.
    std::vector<std::uint64_t> charges(const LedgerKeys& keys, std::span<const std::uint64_t> sizes_bytes) const
        LMCACHE_REQUIRES(mutex_);
    std::uint64_t hash_of(const Object& object) const { return hash_key_(object.name_space, object.hash.data()); }
    std::uint32_t find(std::uint64_t key_hash, std::uint32_t name_space, const std::uint8_t* hash) const
        LMCACHE_REQUIRES(mutex_);
    // By position; kNoNamespace for one without objects.
    std::vector<std::uint32_t> numbers_of(const LedgerKeys& keys) const LMCACHE_REQUIRES(mutex_);
    // Visits keys, the last one first where `reversed`, while the next ones are on their way from memory:
    // visit(i, number of the namespace, key hash). The object is looked up by then, as visits change what is there.
    template <typename Visit>
    void sweep(const LedgerKeys& keys, std::span<const std::uint32_t> numbers, bool reversed, Visit&& visit) const
        LMCACHE_REQUIRES(mutex_);
    template <typename Visit>
    void for_each_known(const LedgerKeys& keys, bool reversed, Visit&& visit) LMCACHE_REQUIRES(mutex_);

    void release(std::uint32_t name_space) LMCACHE_REQUIRES(mutex_);
    // A record of that key in the table, counted as nothing yet.
    std::uint32_t add(std::uint32_t name_space, const std::uint8_t* hash, std::uint64_t key_hash)
        LMCACHE_REQUIRES(mutex_);
    // The record goes, or stays detached while it is read.
    void drop(std::uint32_t index, std::uint64_t key_hash) LMCACHE_REQUIRES(mutex_);
    void forget(std::uint32_t index, std::uint64_t key_hash) LMCACHE_REQUIRES(mutex_);
    // Known from now on, and no longer.
    void begin_counting(std::uint32_t index, std::uint64_t charge_bytes) LMCACHE_REQUIRES(mutex_);
    void end_counting(std::uint32_t index) LMCACHE_REQUIRES(mutex_);
    void note_change(std::uint32_t index, bool added) LMCACHE_REQUIRES(mutex_) {
        if (!changes_.watched()) return;
        const Object& object = objects_[index];
        changes_.add(namespaces_.digest_of(object.name_space), object.hash, object.charge(), added);
    }
    void see_again(std::uint32_t index, std::uint64_t charge_bytes) LMCACHE_REQUIRES(mutex_);
    // Resident and charged to its salt; `enter` is one of the order's ways in. And no longer.
    template <typename Enter>
    void become_resident(std::uint32_t index, Enter&& enter) LMCACHE_REQUIRES(mutex_);
    void leave(std::uint32_t index) LMCACHE_REQUIRES(mutex_);
    std::size_t new_folders(const LedgerKeys& keys, std::span<const std::uint32_t> numbers) const
        LMCACHE_REQUIRES(mutex_);

    mutable Mutex mutex_;
    KeyHash hash_key_;
    ObjectPool objects_ LMCACHE_GUARDED_BY(mutex_);
    KeyTable keys_ LMCACHE_GUARDED_BY(mutex_);  // of all records
    Namespaces namespaces_ LMCACHE_GUARDED_BY(mutex_);
    std::vector<std::string> encoded_ LMCACHE_GUARDED_BY(mutex_);  // by number of the namespace
    std::size_t encoded_bytes_ LMCACHE_GUARDED_BY(mutex_) = 0;
    EvictionOrder order_ LMCACHE_GUARDED_BY(mutex_);  // of what is resident
    FolderCount folders_ LMCACHE_GUARDED_BY(mutex_);
    LedgerCapacity capacity_ LMCACHE_GUARDED_BY(mutex_);
    ChangeLog changes_ LMCACHE_GUARDED_BY(mutex_);
    std::uint8_t scan_ LMCACHE_GUARDED_BY(mutex_) = 0;  // the youngest; wraps around
    std::size_t known_ LMCACHE_GUARDED_BY(mutex_) = 0;  // resident or leaving
    std::size_t leaving_ LMCACHE_GUARDED_BY(mutex_) = 0;
    std::size_t held_ LMCACHE_GUARDED_BY(mutex_) = 0;
    std::uint64_t used_bytes_ LMCACHE_GUARDED_BY(mutex_) = 0;
    std::uint64_t reserved_bytes_ LMCACHE_GUARDED_BY(mutex_) = 0;
};

}  // namespace lmcache
