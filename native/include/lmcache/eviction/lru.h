// Least recently used first.
#pragma once

#include "lmcache/eviction/policy.h"

namespace lmcache {

class Lru final : public QueuePolicy {
public:
    using QueuePolicy::QueuePolicy;

    std::uint32_t victim() override { return queues_.oldest_evictable(queues_[0]); }
};

}  // namespace lmcache
