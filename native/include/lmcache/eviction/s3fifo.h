// Scan-resistant: what was never used again goes before what was. `small` holds the one, `main` the other, and ghosts
// remember what has gone. small gives first while it is above its share; the share follows the ghosts that come back,
// between scans (a small share protects what is reused) and plain LRU (a large one). Unlike the published S3-FIFO, the
// queues are ordered by last use, so that a suffix goes before its prefix here, too.
#pragma once

#include "lmcache/eviction/ghosts.h"
#include "lmcache/eviction/policy.h"

namespace lmcache {

class S3Fifo final : public QueuePolicy {
public:
    using QueuePolicy::QueuePolicy;

    std::size_t queue_of(const Object& object) const override { return object.in_main ? kMain : kSmall; }
    void admit(Object& object, std::uint64_t key_hash) override;
    void use(Object& object) override;
    void evicted(const Object& object, std::uint64_t key_hash) override;
    void prefetch_evicted(std::uint64_t key_hash) const override { ghosts_.prefetch(key_hash); }
    std::uint32_t victim() override;
    void set_room(std::uint64_t units) override;
    std::size_t memory_bytes() const override { return ghosts_.memory_bytes(); }

private:
    static constexpr std::size_t kSmall = 0;
    static constexpr std::size_t kMain = 1;

    void learn(bool was_in_main, std::uint64_t units);

    Ghosts ghosts_;
    std::uint64_t room_units_ = 0;
    std::uint64_t small_share_units_ = 0;
};

}  // namespace lmcache
