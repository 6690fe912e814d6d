// Which chunks have been asked for before, so that the hit rate of an endless cache can be told beside the real one.
//
// Fixed memory, by spatially hashed sampling (Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015):
// a chunk is in the sample when a hash of it is below a threshold, so either all of its requests are or none. At first
// every chunk is; each time kMostKept are known the threshold is halved, and those above it make room as they are come
// across. A sampled request stands for 1 / rate of them. Until the first halving the figures are exact but for chunks
// that find both of their buckets full, less than one in a thousand. Thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lmcache/key_hash.h"
#include "lmcache/mutex.h"

namespace lmcache {

struct SeenCounts {
    double requested = 0;  // chunks, estimated
    double seen = 0;       // of these, how many had been requested before
};

class SeenChunks {
public:
    static constexpr std::size_t kMostKept = std::size_t{1} << 17;

    SeenChunks();

    // A request for these chunks of one prompt, in order, 32 bytes each, which are seen from now on. `scope` separates
    // equal hashes of other namespaces.
    SeenCounts observe(std::uint32_t scope, std::span<const std::uint8_t> hashes);
    // The share of chunks that is in the sample.
    double rate();

private:
    static constexpr std::size_t kBucketChunks = 8;
    static constexpr std::size_t kBuckets = 2 * kMostKept / kBucketChunks;
    static constexpr unsigned kLevels = 24;  // halvings that are possible
    struct alignas(64) Bucket {
        std::array<std::uint64_t, kBucketChunks> chunks{};  // 0: none
    };

    static std::size_t bucket_of(std::uint64_t chunk) { return chunk & (kBuckets - 1); }
    // How many halvings it survives.
    static unsigned level_of(std::uint64_t chunk);
    bool is_sampled(std::uint64_t chunk) const LMCACHE_REQUIRES(mutex_) { return level_of(chunk) >= halvings_; }
    std::size_t seen_prefix(std::uint32_t scope, std::span<const std::uint8_t> hashes) const LMCACHE_REQUIRES(mutex_);
    bool knows(std::uint64_t chunk) const LMCACHE_REQUIRES(mutex_);
    bool see(std::uint64_t chunk) LMCACHE_REQUIRES(mutex_);

    Mutex mutex_;
    KeyHash hash_;
    std::vector<Bucket> buckets_ LMCACHE_GUARDED_BY(mutex_);
    std::array<std::size_t, kLevels + 1> kept_ LMCACHE_GUARDED_BY(mutex_){};  // by level
    std::size_t sampled_ LMCACHE_GUARDED_BY(mutex_) = 0;                      // kept, of those that are in the sample
    unsigned halvings_ LMCACHE_GUARDED_BY(mutex_) = 0;
};

}  // namespace lmcache
