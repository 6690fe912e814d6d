// One LRU for each salt, each with a limit; a salt without one has a limit of 0. The salt that has most of its limit
// gives first. A salt that goes beyond its limit takes room from salts beyond theirs and from itself, never from one
// within its limit.
#pragma once

#include <vector>

#include "lmcache/eviction/fullest_first.h"
#include "lmcache/eviction/policy.h"

namespace lmcache {

class IsolatedLru final : public QueuePolicy {
public:
    IsolatedLru(EvictionQueues& queues, const Namespaces& namespaces) : QueuePolicy(queues), namespaces_(namespaces) {}

    // The queue of a salt has its number.
    std::size_t queue_of(const Object& object) const override { return namespaces_.salt_of(object.name_space); }
    std::uint32_t victim() override { return fullest_.empty() ? kNoObject : oldest_of(fullest_.top()); }

    // Who goes next to make room for so much of that namespace, or kNoObject.
    std::uint32_t victim_for(std::uint32_t name_space, std::uint64_t units);
    // What `victim_for` can free at least.
    std::uint64_t evictable_units_for(std::uint32_t name_space, std::uint64_t units) const;
    // Salts that are above their limits and have something evictable.
    std::vector<std::uint32_t> salts_above_limits() const;
    // The next victim of that salt while it is above its limit, or kNoObject.
    std::uint32_t victim_above_limit(std::uint32_t salt);

    // What the salt had before.
    std::uint64_t set_limit(std::uint32_t salt, std::uint64_t units);
    std::uint64_t limit_of(std::uint32_t salt) const { return salt < shares_.size() ? shares_[salt].limit_units : 0; }
    // Whether the namespace's salt is beyond its limit with so much more.
    bool would_exceed(std::uint32_t name_space, std::uint64_t units) const;
    // What all salts together take beyond their limits.
    std::uint64_t excess_units() const { return excess_units_; }
    // To be called when what the salt takes, or what of it is evictable, has changed.
    void weigh(std::size_t salt);

    std::size_t memory_bytes() const override { return shares_.capacity() * sizeof(Share) + fullest_.memory_bytes(); }
    void check() const override;

private:
    // The share of a salt, as of the last `weigh`.
    struct Share {
        std::uint64_t limit_units = 0;
        std::uint64_t excess_units = 0;  // beyond the limit, staged and quarantined objects included
        std::uint64_t evictable_excess_units = 0;
    };

    std::uint32_t oldest_of(std::uint32_t salt) { return queues_.oldest_evictable(queues_[salt]); }
    Share& share_of(std::size_t salt);
    Fullness fullness(std::uint32_t salt, std::uint64_t more_units = 0) const;

    const Namespaces& namespaces_;
    std::vector<Share> shares_;
    FullestFirst fullest_;  // salts that have something evictable
    std::uint64_t excess_units_ = 0;
    std::uint64_t evictable_excess_units_ = 0;
};

}  // namespace lmcache
