// Which objects have been evicted lately, as 32-bit fingerprints: 8 bytes each. A wrong "yes" (about one in 10^8) costs
// a decision of little worth, never data. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace lmcache {

class Ghosts {
public:
    // Remembers about `count` evictions from now on. Forgets what it knew when the table has to grow.
    void remember(std::size_t count);
    void add(std::uint64_t key_hash, bool was_in_main);
    // Whether it is known, and then from which queue; it is forgotten with that.
    std::optional<bool> take(std::uint64_t key_hash);

    // Fetches what `add` and `take` will read.
    void prefetch(std::uint64_t key_hash) const {
        if (count_ != 0) __builtin_prefetch(&bucket_of(fingerprint_of(key_hash)), 1);
    }
    std::size_t memory_bytes() const { return count_ * sizeof(Bucket); }

private:
    static constexpr std::size_t kBucketGhosts = 8;
    struct Ghost {
        std::uint32_t fingerprint = 0;  // 0: none
        std::uint32_t stamp = 0;        // number of the eviction << 1 | was in main
    };
    struct alignas(64) Bucket {
        Ghost ghosts[kBucketGhosts];
    };

    struct Unmap {
        std::size_t bytes;
        void operator()(Bucket* buckets) const;
    };

    static std::uint32_t fingerprint_of(std::uint64_t key_hash);
    // Pages of zeros that the kernel gives as they are touched, so that growth never stops a call for long.
    void map(std::size_t count);
    Bucket& bucket_of(std::uint32_t fingerprint) const { return buckets_[fingerprint & (count_ - 1)]; }
    std::uint32_t age(const Ghost& ghost) const { return (evictions_ - (ghost.stamp >> 1)) & 0x7FFFFFFFU; }

    std::unique_ptr<Bucket[], Unmap> buckets_;
    std::size_t count_ = 0;  // of buckets, a power of two
    std::uint32_t evictions_ = 0;
    std::uint32_t limit_ = 0;
};

}  // namespace lmcache
