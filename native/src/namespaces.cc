#include "lmcache/namespaces.h"

#include <cstring>

namespace lmcache {

namespace {

// A number without an entry: one that was given back, or the next one.
template <typename Entry>
std::uint32_t take_number(std::vector<std::uint32_t>& unused, std::vector<Entry>& entries) {
    if (unused.empty()) {
        entries.emplace_back();
        return static_cast<std::uint32_t>(entries.size() - 1);
    }
    const std::uint32_t number = unused.back();
    unused.pop_back();
    return number;
}

}  // namespace

std::size_t Namespaces::DigestHash::operator()(const Digest& digest) const {
    std::size_t head;  // digests are SHA-256: any part of one is as good as a hash
    std::memcpy(&head, digest.data(), sizeof(head));
    return head;
}

std::uint32_t Namespaces::find(const Digest& digest) const {
    const auto found = ids_.find(digest);
    return found == ids_.end() ? kNoNamespace : found->second;
}

std::uint32_t Namespaces::refer(const Digest& digest, std::string_view salt) {
    if (const std::uint32_t known = find(digest); known != kNoNamespace) {
        refer(known);
        return known;
    }
    const std::uint32_t id = take_number(unused_, entries_);
    const auto entry = ids_.emplace(digest, id).first;
    entries_[id] = {&entry->first, refer_salt(salt), 1};
    return id;
}

void Namespaces::release(std::uint32_t id) {
    Entry& entry = entries_[id];
    if (--entry.references != 0) return;
    release_salt(entry.salt);
    ids_.erase(ids_.find(*entry.digest));
    entry.digest = nullptr;
    unused_.push_back(id);
}

std::uint32_t Namespaces::refer_salt(std::string_view salt) {
    const auto [entry, is_new] = salts_.try_emplace(std::string(salt), 0);
    if (is_new) {
        entry->second = take_number(unused_salts_, salt_entries_);
        salt_entries_[entry->second] = {&entry->first, 0, 0, false};
        salt_text_bytes_ += entry->first.capacity();
    }
    refer_salt(entry->second);
    return entry->second;
}

void Namespaces::release_salt(std::uint32_t salt) {
    SaltEntry& entry = salt_entries_[salt];
    if (--entry.references != 0) return;
    salt_text_bytes_ -= entry.text->capacity();
    salts_.erase(salts_.find(*entry.text));
    entry.text = nullptr;
    unused_salts_.push_back(salt);
}

std::uint64_t Namespaces::usage_of(std::string_view salt) const {
    const auto found = salts_.find(std::string(salt));
    return found == salts_.end() ? 0 : units_of_salt(found->second);
}

std::vector<std::pair<std::string, std::uint64_t>> Namespaces::usage() const {
    std::vector<std::pair<std::string, std::uint64_t>> result;
    for (const auto& [salt, number] : salts_) {
        if (units_of_salt(number) != 0) result.emplace_back(salt, units_of_salt(number));
    }
    return result;
}

std::uint64_t Namespaces::total_units() const {
    std::uint64_t total = 0;
    for (const auto& [salt, number] : salts_) total += units_of_salt(number);
    return total;
}

std::size_t Namespaces::memory_bytes() const {
    constexpr std::size_t kNodeOverheadBytes = 32;  // links, cached hash, allocator
    return ids_.size() * (sizeof(Digest) + sizeof(std::uint32_t) + kNodeOverheadBytes) +
           salts_.size() * (sizeof(std::string) + sizeof(std::uint32_t) + kNodeOverheadBytes) + salt_text_bytes_ +
           (ids_.bucket_count() + salts_.bucket_count()) * sizeof(void*) + entries_.capacity() * sizeof(Entry) +
           salt_entries_.capacity() * sizeof(SaltEntry) +
           (unused_.capacity() + unused_salts_.capacity()) * sizeof(std::uint32_t);
}

}  // namespace lmcache
