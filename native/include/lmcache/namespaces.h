// Namespaces as small integers for as long as something refers to them, and the memory that each cache salt takes.
//
// Callers outside of the core name a namespace by its digest, never by its number: a number is given to another
// namespace once nothing refers to the first one. Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lmcache/limits.h"

namespace lmcache {

using Digest = std::array<std::uint8_t, kDigestBytes>;

inline constexpr std::uint32_t kNoNamespace = ~std::uint32_t{0};

class Namespaces {
public:
    // The number of a namespace, kNoNamespace where nothing refers to it.
    std::uint32_t find(const Digest& digest) const;
    // Adds a reference and returns the number. The salt that comes with the first reference counts.
    std::uint32_t refer(const Digest& digest, std::string_view salt);
    void refer(std::uint32_t id) { ++entries_[id].references; }
    // Ends a reference; with the last one the number, and maybe that of its salt, is free for others.
    void release(std::uint32_t id);

    // The same for the number of a salt. Each namespace refers to its salt.
    std::uint32_t refer_salt(std::string_view salt);
    void refer_salt(std::uint32_t salt) { ++salt_entries_[salt].references; }
    void release_salt(std::uint32_t salt);

    const Digest& digest_of(std::uint32_t id) const { return *entries_[id].digest; }
    std::uint32_t salt_of(std::uint32_t id) const { return entries_[id].salt; }
    std::uint32_t references(std::uint32_t id) const { return entries_[id].references; }
    std::uint32_t salt_references(std::uint32_t salt) const { return salt_entries_[salt].references; }
    std::size_t size() const { return ids_.size(); }
    std::size_t salts() const { return salts_.size(); }
    // Numbers are below.
    std::uint32_t end() const { return static_cast<std::uint32_t>(entries_.size()); }
    std::uint32_t salts_end() const { return static_cast<std::uint32_t>(salt_entries_.size()); }

    const std::string& text_of_salt(std::uint32_t salt) const { return *salt_entries_[salt].text; }
    std::uint64_t units_of_salt(std::uint32_t salt) const { return salt_entries_[salt].units; }
    void add_units(std::uint32_t id, std::uint64_t units) { salt_entries_[salt_of(id)].units += units; }
    void subtract_units(std::uint32_t id, std::uint64_t units) { salt_entries_[salt_of(id)].units -= units; }
    // Whether it is noted for the first time since it got its number.
    bool note(std::uint32_t salt) { return !std::exchange(salt_entries_[salt].noted, true); }

    // Units taken by that salt.
    std::uint64_t usage_of(std::string_view salt) const;
    // (salt, units taken) of every salt that takes memory.
    std::vector<std::pair<std::string, std::uint64_t>> usage() const;
    std::uint64_t total_units() const;
    std::size_t memory_bytes() const;

private:
    struct DigestHash {
        std::size_t operator()(const Digest& digest) const;
    };
    struct Entry {
        const Digest* digest;  // the key in ids_; null: unused
        std::uint32_t salt;
        std::uint32_t references;
    };
    struct SaltEntry {
        const std::string* text;  // the key in salts_; null: unused
        std::uint64_t units;
        std::uint32_t references;
        bool noted;
    };

    std::unordered_map<Digest, std::uint32_t, DigestHash> ids_;
    std::vector<Entry> entries_;
    std::vector<std::uint32_t> unused_;
    std::unordered_map<std::string, std::uint32_t> salts_;
    std::vector<SaltEntry> salt_entries_;
    std::vector<std::uint32_t> unused_salts_;
    std::size_t salt_text_bytes_ = 0;
};

// A reference to each namespace of a call, for the length of the call.
class NamespaceReferences {
public:
    NamespaceReferences(Namespaces& namespaces, std::span<const Digest> digests, std::string_view salt)
        : NamespaceReferences(namespaces) {  // complete from here on: what was taken is given back also on a fault
        ids_.reserve(digests.size());
        for (const Digest& digest : digests) ids_.push_back(namespaces_.refer(digest, salt));
    }
    ~NamespaceReferences() {
        for (const std::uint32_t id : ids_) namespaces_.release(id);
    }
    NamespaceReferences(const NamespaceReferences&) = delete;
    NamespaceReferences& operator=(const NamespaceReferences&) = delete;

    const std::vector<std::uint32_t>& ids() const { return ids_; }

private:
    explicit NamespaceReferences(Namespaces& namespaces) : namespaces_(namespaces) {}

    Namespaces& namespaces_;
    std::vector<std::uint32_t> ids_;
};

}  // namespace lmcache
