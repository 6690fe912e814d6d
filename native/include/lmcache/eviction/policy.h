// What an eviction policy decides: the queue that an object belongs in, and the queue that gives next. A file each:
//
//   lru.h           one queue
//   isolated_lru.h  one queue a salt, each with a limit; the salt that has most of its limit gives first
//   s3fifo.h        one for what was never used again, one for what was, and a memory of what has gone
//   noop.h          one queue that never gives
//
// A new policy is a class in a file of its own, an enumerator here, its name and its case in policies.cc, and the same
// name where it is offered: config/spec.py, l2/adapter_config.py and cli/cache_simulator.py. One that needs its queues
// from the start, or goes by limits of salts, says so in the constructor of EvictionOrder, too (order.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "lmcache/eviction/queues.h"
#include "lmcache/namespaces.h"

namespace lmcache {

enum class EvictionPolicy : std::uint8_t { kNoop, kLru, kIsolatedLru, kS3Fifo };

// By the name that configurations use. Throws std::invalid_argument that lists the names.
EvictionPolicy eviction_policy_named(std::string_view name);

class QueuePolicy {
public:
    explicit QueuePolicy(EvictionQueues& queues) : queues_(queues) {}
    virtual ~QueuePolicy() = default;
    QueuePolicy(const QueuePolicy&) = delete;
    QueuePolicy& operator=(const QueuePolicy&) = delete;

    // The number of the object's queue.
    virtual std::size_t queue_of(const Object&) const { return 0; }
    // A new object is about to enter its queue.
    virtual void admit(Object&, std::uint64_t /*key_hash*/) {}
    // It was used by a request and is not linked: it may belong in another queue from now on.
    virtual void use(Object&) {}
    // It leaves to make room.
    virtual void evicted(const Object&, std::uint64_t /*key_hash*/) {}
    // Fetches what `evicted` will read.
    virtual void prefetch_evicted(std::uint64_t /*key_hash*/) const {}
    // Who goes next, or kNoObject.
    virtual std::uint32_t victim() = 0;
    // How much all objects together may take.
    virtual void set_room(std::uint64_t /*units*/) {}
    virtual std::size_t memory_bytes() const { return 0; }
    virtual void check() const {}

protected:
    EvictionQueues& queues_;
};

std::unique_ptr<QueuePolicy> make_queue_policy(EvictionPolicy policy, EvictionQueues& queues,
                                               const Namespaces& namespaces);

}  // namespace lmcache
