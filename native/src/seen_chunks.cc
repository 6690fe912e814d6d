#include "lmcache/seen_chunks.h"

#include <algorithm>
#include <bit>

#include "lmcache/limits.h"

namespace lmcache {

SeenChunks::SeenChunks() : buckets_(kBuckets) {}

unsigned SeenChunks::level_of(std::uint64_t chunk) {
    // The buckets use the other end.
    return std::min(static_cast<unsigned>(std::countl_zero(chunk)), kLevels);
}

double SeenChunks::rate() {
    const MutexLock lock(mutex_);
    return 1.0 / static_cast<double>(std::uint64_t{1} << halvings_);
}

SeenCounts SeenChunks::observe(std::uint32_t scope, std::span<const std::uint8_t> hashes) {
    constexpr std::size_t kAhead = 32;
    std::array<std::uint64_t, kAhead> ahead;
    const MutexLock lock(mutex_);
    SeenCounts counts;
    const std::size_t total = hashes.size() / kChunkHashBytes;
    std::size_t first = 0;
    if (halvings_ == 0) {  // all are in the sample
        first = seen_prefix(scope, hashes);
        counts.requested = counts.seen = static_cast<double>(first);
    }
    for (std::size_t begin = first; begin < total; begin += kAhead) {
        const std::size_t count = std::min(kAhead, total - begin);
        for (std::size_t i = 0; i < count; ++i) {
            ahead[i] = std::max<std::uint64_t>(1, hash_(scope, &hashes[(begin + i) * kChunkHashBytes]));
            if (is_sampled(ahead[i])) __builtin_prefetch(&buckets_[bucket_of(ahead[i])], 1);
        }
        for (std::size_t i = 0; i < count; ++i) {
            if (!is_sampled(ahead[i])) continue;
            const auto weight = static_cast<double>(std::uint64_t{1} << halvings_);
            counts.requested += weight;
            if (see(ahead[i])) counts.seen += weight;
        }
    }
    return counts;
}

// A chunk is seen with all that come before it, so the end of what was seen is found by halves.
std::size_t SeenChunks::seen_prefix(std::uint32_t scope, std::span<const std::uint8_t> hashes) const {
    std::size_t seen = 0;
    std::size_t end = hashes.size() / kChunkHashBytes;
    for (std::size_t probe = end; seen < end; probe = seen + (end - seen + 1) / 2) {  // the last one first
        const std::uint64_t chunk = std::max<std::uint64_t>(1, hash_(scope, &hashes[(probe - 1) * kChunkHashBytes]));
        if (knows(chunk)) {
            seen = probe;
        } else {
            end = probe - 1;
        }
    }
    return seen;
}

bool SeenChunks::knows(std::uint64_t chunk) const {
    const std::size_t own = bucket_of(chunk);
    const auto holds = [chunk](const Bucket& bucket) {
        return std::find(bucket.chunks.begin(), bucket.chunks.end(), chunk) != bucket.chunks.end();
    };
    return holds(buckets_[own]) || holds(buckets_[own ^ 1]);
}

// Whether it was seen before.
bool SeenChunks::see(std::uint64_t chunk) {
    std::uint64_t* place = nullptr;
    for (const std::size_t bucket : {bucket_of(chunk), bucket_of(chunk) ^ 1}) {
        for (std::uint64_t& kept : buckets_[bucket].chunks) {
            if (kept == chunk) return true;
            if (place == nullptr && (kept == 0 || !is_sampled(kept))) place = &kept;
        }
        if (place != nullptr && bucket == bucket_of(chunk)) {
            // It went to the other bucket only when this one was full, and what is freed here since is older.
            const auto& other = buckets_[bucket ^ 1].chunks;
            if (std::find(other.begin(), other.end(), chunk) != other.end()) return true;
            break;
        }
    }
    if (place == nullptr) return false;  // both are full
    if (*place != 0) --kept_[level_of(*place)];
    *place = chunk;
    ++kept_[level_of(chunk)];
    if (++sampled_ >= kMostKept && halvings_ < kLevels) {
        sampled_ -= kept_[halvings_];
        ++halvings_;
    }
    return false;
}

}  // namespace lmcache
