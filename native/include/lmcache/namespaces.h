// Namespaces as small integers, and the memory that each cache salt takes. Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lmcache/limits.h"

namespace lmcache {

using Digest = std::array<std::uint8_t, kDigestBytes>;

class Namespaces {
public:
    // The same digest gives the same number, and its first salt stays. std::length_error beyond kMaxNamespaces.
    std::uint32_t intern(const Digest& digest, std::string_view salt);

    // The number of a salt, which it keeps.
    std::uint32_t intern_salt(std::string_view salt);

    std::uint32_t salt_of(std::uint32_t id) const { return salt_of_[id]; }
    std::uint64_t units_of_salt(std::uint32_t salt) const { return units_of_salt_[salt]; }
    bool known(std::uint32_t id) const { return id < salt_of_.size(); }
    std::size_t size() const { return salt_of_.size(); }

    void add_units(std::uint32_t id, std::uint32_t units) { units_of_salt_[salt_of_[id]] += units; }
    void subtract_units(std::uint32_t id, std::uint32_t units) { units_of_salt_[salt_of_[id]] -= units; }

    // (salt, units taken) of every salt that takes memory.
    std::vector<std::pair<std::string, std::uint64_t>> usage() const;
    std::uint64_t total_units() const;
    std::size_t memory_bytes() const;

private:
    struct DigestHash {
        std::size_t operator()(const Digest& digest) const;
    };

    std::unordered_map<Digest, std::uint32_t, DigestHash> ids_;
    std::vector<std::uint32_t> salt_of_;  // by namespace
    std::unordered_map<std::string, std::uint32_t> salts_;
    std::vector<std::uint64_t> units_of_salt_;
    std::size_t salt_text_bytes_ = 0;
};

}  // namespace lmcache
