#include <stdexcept>
#include <string>
#include <utility>

#include "lmcache/eviction/isolated_lru.h"
#include "lmcache/eviction/lru.h"
#include "lmcache/eviction/noop.h"
#include "lmcache/eviction/s3fifo.h"

namespace lmcache {

EvictionPolicy eviction_policy_named(std::string_view name) {
    constexpr std::pair<std::string_view, EvictionPolicy> kPolicies[] = {
        {"LRU", EvictionPolicy::kLru},
        {"IsolatedLRU", EvictionPolicy::kIsolatedLru},
        {"S3FIFO", EvictionPolicy::kS3Fifo},
        {"noop", EvictionPolicy::kNoop},
    };
    for (const auto& [known, policy] : kPolicies) {
        if (known == name) return policy;
    }
    throw std::invalid_argument("policy must be LRU, IsolatedLRU, S3FIFO or noop, not \"" + std::string(name) + "\"");
}

std::unique_ptr<QueuePolicy> make_queue_policy(EvictionPolicy policy, EvictionQueues& queues,
                                               const Namespaces& namespaces) {
    switch (policy) {
        case EvictionPolicy::kNoop:
            return std::make_unique<Noop>(queues);
        case EvictionPolicy::kLru:
            return std::make_unique<Lru>(queues);
        case EvictionPolicy::kIsolatedLru:
            return std::make_unique<IsolatedLru>(queues, namespaces);
        case EvictionPolicy::kS3Fifo:
            return std::make_unique<S3Fifo>(queues);
    }
    throw std::logic_error("make_queue_policy: unknown policy");
}

}  // namespace lmcache
