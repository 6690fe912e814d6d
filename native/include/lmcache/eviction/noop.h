// Never evicts.
#pragma once

#include "lmcache/eviction/policy.h"

namespace lmcache {

class Noop final : public QueuePolicy {
public:
    using QueuePolicy::QueuePolicy;

    std::uint32_t victim() override { return kNoObject; }
};

}  // namespace lmcache
