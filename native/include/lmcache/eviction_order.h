// Who goes first when room is needed: the resident objects in one or several queues, each in the order of last use.
//
//   LRU          one queue
//   IsolatedLRU  one queue a salt, each with a limit; the salt that has most of its limit gives first. A salt that goes
//                beyond its limit takes room from salts beyond theirs and from itself, never from one within its limit
//   S3FIFO       `small` for what was never used again and `main` for what was, and a memory (ghosts) of what has gone.
//                small gives first while it is above its share; the share follows the ghosts that come back, between
//                scans (a small share protects what is reused) and plain LRU (a large one). Unlike the published
//                S3-FIFO, the queues are ordered by last use, so that a suffix goes before its prefix here, too.
//
// Invariant: every resident object that nobody reads is linked in its queue. One that is being read may be linked as
// well; it is passed over, and takes its place again when it is let go. Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "lmcache/fullest_first.h"
#include "lmcache/ghosts.h"
#include "lmcache/namespaces.h"
#include "lmcache/object_pool.h"

namespace lmcache {

enum class EvictionPolicy : std::uint8_t { kNoop, kLru, kIsolatedLru, kS3Fifo };

class EvictionOrder {
public:
    EvictionOrder(EvictionPolicy policy, ObjectPool& objects, const Namespaces& namespaces)
        : policy_(policy),
          objects_(objects),
          namespaces_(namespaces),
          queues_(policy == EvictionPolicy::kS3Fifo ? 2 : 1) {}

    // ---- the life of an object in the order -------------------------------------------------------------------------
    // It became resident; it is not linked yet. With readers it counts as being read.
    void enter(std::uint32_t index, std::uint64_t key_hash);
    // It is no longer resident. `evicted`: to make room.
    void leave(std::uint32_t index);
    void evicted(std::uint32_t index, std::uint64_t key_hash);
    // Fetches what `evicted` will read.
    void prefetch_evicted(std::uint64_t key_hash) const { ghosts_.prefetch(key_hash); }
    // Its first reader came, its last reader went.
    void begin_reading(std::uint32_t index);
    void end_reading(std::uint32_t index);
    // It was used by a request. Objects of a prefix are used last chunk first.
    void use(std::uint32_t index);
    // The youngest of its queue from now on.
    void to_newest(std::uint32_t index);
    // Out of the queue while it is read, so that nobody who looks for victims meets it.
    void set_aside(std::uint32_t index);
    // Linked where it was, as far as can be told, if it is not linked.
    void put_back(std::uint32_t index);

    // ---- decisions --------------------------------------------------------------------------------------------------
    // Who goes next, or kNoObject.
    std::uint32_t victim();
    // Who goes next to make room for so much of that namespace, or kNoObject.
    std::uint32_t victim_for(std::uint32_t name_space, std::uint32_t units);
    // Salts that are above their limits and have something evictable.
    std::vector<std::uint32_t> salts_above_limits() const;
    // The next victim of that salt while it is above its limit, or kNoObject.
    std::uint32_t victim_above_limit(std::uint32_t salt);
    // Whether making room for one may cost the other.
    bool may_go_together(std::uint32_t a, std::uint32_t b) const;
    // Whether `a` was used before `b`. The order holds beyond the wrap of the counter.
    bool is_older(std::uint32_t a, std::uint32_t b) const {
        return static_cast<std::int32_t>(objects_[a].last_use - objects_[b].last_use) < 0;
    }
    // What `victim_for` can free at least.
    std::uint64_t evictable_units_for(std::uint32_t name_space, std::uint32_t units) const;

    // ---- limits of salts, in force under IsolatedLRU ----------------------------------------------------------------
    bool has_limits() const { return policy_ == EvictionPolicy::kIsolatedLru; }
    // What the salt had before.
    std::uint64_t set_limit(std::uint32_t salt, std::uint64_t units);
    std::uint64_t limit_of(std::uint32_t salt) const { return salt < queues_.size() ? queues_[salt].limit_units : 0; }
    // To be told when what a salt takes has changed, and before its number stands for another one.
    void usage_changed(std::uint32_t salt) {
        if (has_limits()) weigh(salt);
    }
    // Whether the namespace's salt is beyond its limit with so much more.
    bool would_exceed(std::uint32_t name_space, std::uint32_t units) const;
    // What all salts together take beyond their limits.
    std::uint64_t excess_units() const { return excess_units_; }

    bool evicts() const { return policy_ != EvictionPolicy::kNoop; }
    // What `small` may grow to is a part of this.
    void set_room(std::uint64_t units);
    std::size_t memory_bytes() const;
    // Throws std::runtime_error that names the broken invariant.
    void check() const;

private:
    struct Queue {
        std::uint32_t newest = kNoObject;
        std::uint32_t oldest = kNoObject;
        std::uint64_t units = 0;  // of all its objects, linked or not
        std::uint64_t evictable_units = 0;
        // Of a salt, as of the last `weigh`.
        std::uint64_t limit_units = 0;
        std::uint64_t excess_units = 0;  // beyond the limit, staged and quarantined objects included
        std::uint64_t evictable_excess_units = 0;
    };
    static constexpr std::size_t kSmall = 0;
    static constexpr std::size_t kMain = 1;

    std::size_t queue_number(const Object& object) const;
    Queue& queue_of(const Object& object) { return queue_at(queue_number(object)); }
    Queue& queue_at(std::size_t number);
    void link_newest(std::uint32_t index);
    void unlink(std::uint32_t index);
    std::uint32_t oldest_evictable(Queue& queue);
    std::uint32_t s3_victim();
    Fullness fullness(std::size_t salt, std::uint64_t more_units = 0) const;
    void weigh(std::size_t salt);
    void learn(bool was_in_main, std::uint32_t units);

    EvictionPolicy policy_;
    ObjectPool& objects_;
    const Namespaces& namespaces_;
    std::vector<Queue> queues_;
    std::uint32_t uses_ = 0;
    std::uint64_t evictable_units_ = 0;
    std::size_t residents_ = 0;

    FullestFirst fullest_;  // salts that have something evictable
    std::uint64_t excess_units_ = 0;
    std::uint64_t evictable_excess_units_ = 0;

    Ghosts ghosts_;
    std::uint64_t room_units_ = 0;
    std::uint64_t small_share_units_ = 0;
};

}  // namespace lmcache
