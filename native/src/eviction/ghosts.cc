#include "lmcache/eviction/ghosts.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <new>

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
    if (needed > count_) map(needed);
}

void Ghosts::map(std::size_t count) {
    const std::size_t bytes = count * sizeof(Bucket);
    void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    madvise(pages, bytes,
            MADV_NOHUGEPAGE);  // evictions touch it at random: each large page would be a long first touch
    buckets_ = {static_cast<Bucket*>(pages), Unmap{bytes}};
    count_ = count;
}

void Ghosts::Unmap::operator()(Bucket* buckets) const { munmap(buckets, bytes); }

void Ghosts::add(std::uint64_t key_hash, bool was_in_main) {
    if (count_ == 0) return;
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
    if (count_ == 0) return std::nullopt;
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
