// The 64-bit hash of a key, seeded at random, so that nobody can choose keys that collide.
#pragma once

#include <sys/random.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <system_error>

#include "lmcache/limits.h"

namespace lmcache {

class KeyHash {
public:
    KeyHash() {
        // Up to 256 bytes come whole. std::random_device would tie a wheel to glibc 2.36.
        if (::getrandom(seeds_.data(), sizeof(seeds_), 0) != sizeof(seeds_))
            throw std::system_error(errno, std::generic_category(), "getrandom");
    }

    // Hashes the number of a namespace and a chunk hash.
    std::uint64_t operator()(std::uint32_t name_space, const std::uint8_t* hash) const {
        std::array<std::uint64_t, 4> words;
        static_assert(sizeof(words) == kChunkHashBytes);
        std::memcpy(words.data(), hash, sizeof(words));
        const std::uint64_t head = multiply_fold(words[0] ^ seeds_[0], words[1] ^ seeds_[1]);
        const std::uint64_t tail = multiply_fold(words[2] ^ seeds_[2], words[3] ^ seeds_[3]);
        return multiply_fold(head ^ name_space ^ seeds_[3], tail ^ seeds_[0]);
    }

private:
    static std::uint64_t multiply_fold(std::uint64_t a, std::uint64_t b) {
        const auto product = static_cast<unsigned __int128>(a) * b;
        return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
    }

    std::array<std::uint64_t, 4> seeds_;
};

}  // namespace lmcache
