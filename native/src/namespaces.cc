#include "lmcache/namespaces.h"

#include <cstring>
#include <stdexcept>

namespace lmcache {

std::size_t Namespaces::DigestHash::operator()(const Digest& digest) const {
    std::size_t head;  // digests are SHA-256: any part of one is as good as a hash
    std::memcpy(&head, digest.data(), sizeof(head));
    return head;
}

std::uint32_t Namespaces::intern(const Digest& digest, std::string_view salt) {
    const auto found = ids_.find(digest);
    if (found != ids_.end()) return found->second;
    if (salt_of_.size() >= kMaxNamespaces) throw std::length_error("too many namespaces");
    const std::uint32_t number = intern_salt(salt);
    const auto id = static_cast<std::uint32_t>(salt_of_.size());
    salt_of_.push_back(number);
    ids_.emplace(digest, id);
    return id;
}

std::uint32_t Namespaces::intern_salt(std::string_view salt) {
    const auto [entry, is_new] =
        salts_.try_emplace(std::string(salt), static_cast<std::uint32_t>(units_of_salt_.size()));
    if (is_new) {
        units_of_salt_.push_back(0);
        salt_text_bytes_ += entry->first.capacity();
    }
    return entry->second;
}

std::vector<std::pair<std::string, std::uint64_t>> Namespaces::usage() const {
    std::vector<std::pair<std::string, std::uint64_t>> result;
    for (const auto& [salt, number] : salts_) {
        if (units_of_salt_[number] != 0) result.emplace_back(salt, units_of_salt_[number]);
    }
    return result;
}

std::uint64_t Namespaces::total_units() const {
    std::uint64_t total = 0;
    for (const std::uint64_t units : units_of_salt_) total += units;
    return total;
}

std::size_t Namespaces::memory_bytes() const {
    constexpr std::size_t kNodeOverheadBytes = 32;  // links, cached hash, allocator
    return ids_.size() * (sizeof(Digest) + sizeof(std::uint32_t) + kNodeOverheadBytes) +
           salts_.size() * (sizeof(std::string) + sizeof(std::uint32_t) + kNodeOverheadBytes) + salt_text_bytes_ +
           (ids_.bucket_count() + salts_.bucket_count()) * sizeof(void*) + salt_of_.capacity() * sizeof(salt_of_[0]) +
           units_of_salt_.capacity() * sizeof(units_of_salt_[0]);
}

}  // namespace lmcache
