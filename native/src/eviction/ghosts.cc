#include "lmcache/eviction/ghosts.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <new>

#include "lmcache/rounding.h"

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
    const std::size_t needed = std::bit_ceil(div_ceil(count, kBucketGhosts));
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

void Ghosts::add(std::uint64_t key_hash, std::uint8_t value) {
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
    ++added_;
    *place = {fingerprint, added_ << kValueBits | value};
}

Ghosts::Ghost* Ghosts::known(std::uint64_t key_hash) const {
    if (count_ == 0) return nullptr;
    const std::uint32_t fingerprint = fingerprint_of(key_hash);
    for (Ghost& ghost : bucket_of(fingerprint).ghosts) {
        if (ghost.fingerprint == fingerprint) return &ghost;
    }
    return nullptr;
}

std::optional<std::uint8_t> Ghosts::take(std::uint64_t key_hash) {
    const std::optional<std::uint8_t> value = find(key_hash);
    if (Ghost* const ghost = known(key_hash)) *ghost = {};
    return value;
}

std::optional<std::uint8_t> Ghosts::find(std::uint64_t key_hash) const {
    const Ghost* const ghost = known(key_hash);
    if (ghost == nullptr || age(*ghost) >= limit_) return std::nullopt;
    return static_cast<std::uint8_t>(ghost->stamp & kMaxValue);
}

}  // namespace lmcache
