#include "lmcache/ghosts.h"

#include <algorithm>
#include <bit>

namespace lmcache {

std::uint32_t Ghosts::fingerprint_of(std::uint64_t key_hash) {
    // The key table's parts and tags use the ends of the hash.
    const auto fingerprint = static_cast<std::uint32_t>(key_hash >> 16);
    return fingerprint == 0 ? 1 : fingerprint;
}

void Ghosts::remember(std::size_t count) {
    constexpr std::size_t kMaxGhosts = std::size_t{1} << 28;
    count = std::clamp<std::size_t>(count, kBucketGhosts, kMaxGhosts);
    limit_ = static_cast<std::uint32_t>(count);
    const std::size_t needed = std::bit_ceil((count + kBucketGhosts - 1) / kBucketGhosts);
    if (needed > buckets_.size()) buckets_ = std::vector<Bucket>(needed);
}

void Ghosts::add(std::uint64_t key_hash, bool was_in_main) {
    if (buckets_.empty()) return;
    const std::uint32_t fingerprint = fingerprint_of(key_hash);
    Bucket& bucket = bucket_of(fingerprint);
    Ghost* place = &bucket.ghosts[0];
    for (Ghost& ghost : bucket.ghosts) {
        if (ghost.fingerprint == fingerprint || ghost.fingerprint == 0) {
            place = &ghost;
            break;
        }
        if (age(ghost) > age(*place)) place = &ghost;
    }
    ++evictions_;
    *place = {fingerprint, evictions_ << 1 | std::uint32_t{was_in_main}};
}

std::optional<bool> Ghosts::take(std::uint64_t key_hash) {
    if (buckets_.empty()) return std::nullopt;
    const std::uint32_t fingerprint = fingerprint_of(key_hash);
    for (Ghost& ghost : bucket_of(fingerprint).ghosts) {
        if (ghost.fingerprint != fingerprint) continue;
        const bool is_recent = age(ghost) < limit_;
        const bool was_in_main = (ghost.stamp & 1) != 0;
        ghost = {};
        if (is_recent) return was_in_main;
        return std::nullopt;
    }
    return std::nullopt;
}

}  // namespace lmcache
