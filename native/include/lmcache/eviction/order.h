// Who goes first when room is needed: the resident objects of L1, or of a ledger, in the queues of one policy.
// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "lmcache/eviction/isolated_lru.h"
#include "lmcache/eviction/policy.h"
#include "lmcache/eviction/queues.h"
#include "lmcache/namespaces.h"
#include "lmcache/object_pool.h"

namespace lmcache {

class EvictionOrder {
public:
    EvictionOrder(EvictionPolicy policy, ObjectPool& objects, const Namespaces& namespaces)
        : objects_(objects),
          queues_(objects, policy == EvictionPolicy::kS3Fifo ? 2 : 1),
          policy_(make_queue_policy(policy, queues_, namespaces)),
          limits_(policy == EvictionPolicy::kIsolatedLru ? static_cast<IsolatedLru*>(policy_.get()) : nullptr),
          evicts_(policy != EvictionPolicy::kNoop) {}

    // ---- objects, from first to last --------------------------------------------------------------------------------
    // It became resident; it is not linked yet. With readers it counts as being read.
    void enter(std::uint32_t index, std::uint64_t key_hash);
    // The same for one that is older than all others; it is linked.
    void enter_oldest(std::uint32_t index);
    // It left and is resident after all. It is not linked yet and has the place and the queue that it had.
    void enter_again(std::uint32_t index);
    // It is no longer resident.
    void leave(std::uint32_t index);
    // To make room, before or after it has left.
    void evicted(std::uint32_t index, std::uint64_t key_hash) { policy_->evicted(objects_[index], key_hash); }
    // Fetches what `evicted` will read.
    void prefetch_evicted(std::uint64_t key_hash) const { policy_->prefetch_evicted(key_hash); }
    // Its first reader came, its last reader went.
    void begin_reading(std::uint32_t index);
    void end_reading(std::uint32_t index);
    // It was used by a request. Objects of a prefix are used last chunk first.
    void use(std::uint32_t index);
    // The youngest of its queue from now on.
    void to_newest(std::uint32_t index);
    // Linked where it was, as far as is known, if it is not linked.
    void put_back(std::uint32_t index);

    // ---- decisions --------------------------------------------------------------------------------------------------
    // Who goes next, or kNoObject.
    std::uint32_t victim() { return policy_->victim(); }
    // Who goes next to make room for so much of that namespace, or kNoObject.
    std::uint32_t victim_for(std::uint32_t name_space, std::uint32_t units) {
        return limits_ ? limits_->victim_for(name_space, units) : victim();
    }
    // What `victim_for` can free at least.
    std::uint64_t evictable_units_for(std::uint32_t name_space, std::uint32_t units) const {
        return limits_ ? limits_->evictable_units_for(name_space, units) : queues_.evictable_units();
    }
    // Whether making room for one may cost the other.
    bool may_go_together(std::uint32_t a, std::uint32_t b) const {
        return !limits_ || limits_->queue_of(objects_[a]) == limits_->queue_of(objects_[b]);
    }
    bool is_older(std::uint32_t a, std::uint32_t b) const { return queues_.is_older(a, b); }
    bool evicts() const { return evicts_; }
    // How much all objects together may take.
    void set_room(std::uint64_t units) { policy_->set_room(units); }

    // ---- limits of salts: in force under IsolatedLRU, else there are none -------------------------------------------
    bool has_limits() const { return limits_ != nullptr; }
    // What the salt had before. See also `limit_salt`.
    std::uint64_t set_limit(std::uint32_t salt, std::uint64_t units) { return limits_->set_limit(salt, units); }
    std::uint64_t limit_of(std::uint32_t salt) const { return limits_ ? limits_->limit_of(salt) : 0; }
    bool would_exceed(std::uint32_t name_space, std::uint32_t units) const {
        return limits_ && limits_->would_exceed(name_space, units);
    }
    std::uint64_t excess_units() const { return limits_ ? limits_->excess_units() : 0; }
    std::vector<std::uint32_t> salts_above_limits() const {
        return limits_ ? limits_->salts_above_limits() : std::vector<std::uint32_t>();
    }
    std::uint32_t victim_above_limit(std::uint32_t salt) {
        return limits_ ? limits_->victim_above_limit(salt) : kNoObject;
    }
    // To be called when what a salt takes has changed, and before its number stands for another one.
    void usage_changed(std::uint32_t salt) {
        if (limits_) limits_->weigh(salt);
    }

    std::size_t memory_bytes() const { return queues_.memory_bytes() + policy_->memory_bytes(); }
    // Throws std::runtime_error that names the broken invariant.
    void check() const;

private:
    std::size_t number_of(const Object& object) const { return policy_->queue_of(object); }
    EvictionQueues::Queue& queue_of(const Object& object) { return queues_[number_of(object)]; }
    void unlink(std::uint32_t index);

    ObjectPool& objects_;
    EvictionQueues queues_;
    std::unique_ptr<QueuePolicy> policy_;
    IsolatedLru* limits_;  // the policy, where it goes by limits
    bool evicts_;
};

// Sets the limit of a salt, which keeps its number for as long as it has one; 0: no limit. Nothing where the policy has
// no limits.
void limit_salt(EvictionOrder& order, Namespaces& namespaces, std::string_view salt, std::uint64_t units);

}  // namespace lmcache
