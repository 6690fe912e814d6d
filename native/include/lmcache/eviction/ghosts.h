// Which objects have left lately, as 32-bit fingerprints with a value of 3 bits: 8 bytes each. With n of them a wrong
// "yes" has a chance of n in 2^32; it costs a decision or a figure of little worth, never data. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace lmcache {

class Ghosts {
public:
    static constexpr std::uint8_t kMaxValue = 7;

    // Remembers about `count` objects from now on. Forgets what it knew when the table has to grow.
    void remember(std::size_t count);
    // Replaces what was known of it.
    void add(std::uint64_t key_hash, std::uint8_t value);
    // Its value, if it is known; it is forgotten with that.
    std::optional<std::uint8_t> take(std::uint64_t key_hash);
    // The same, and it stays known.
    std::optional<std::uint8_t> find(std::uint64_t key_hash) const;

    // Fetches what `add` and `take` will read.
    void prefetch(std::uint64_t key_hash) const {
        if (count_ != 0) __builtin_prefetch(&bucket_of(fingerprint_of(key_hash)), 1);
    }
    std::size_t memory_bytes() const { return count_ * sizeof(Bucket); }

private:
    static constexpr std::size_t kBucketGhosts = 8;
    static constexpr std::uint32_t kValueBits = 3;
    static constexpr std::uint32_t kAgeMask = (1U << (32 - kValueBits)) - 1;
    struct Ghost {
        std::uint32_t fingerprint = 0;  // 0: none
        std::uint32_t stamp = 0;        // number of the addition << kValueBits | value
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
    Ghost* known(std::uint64_t key_hash) const;
    std::uint32_t age(const Ghost& ghost) const { return (added_ - (ghost.stamp >> kValueBits)) & kAgeMask; }

    std::unique_ptr<Bucket[], Unmap> buckets_;
    std::size_t count_ = 0;  // of buckets, a power of two
    std::uint32_t added_ = 0;
    std::uint32_t limit_ = 0;
};

}  // namespace lmcache
