#include "lmcache/change_log.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "lmcache/key_hash.h"

namespace lmcache {

namespace {

struct DigestHash {
    std::size_t operator()(const Digest& digest) const {
        std::size_t head;  // digests are SHA-256: any part of one is as good as a hash
        std::memcpy(&head, digest.data(), sizeof(head));
        return head;
    }
};

}  // namespace

// ---- the log --------------------------------------------------------------------------------------------------------

void ChangeLog::unwatch() {
    if (readers_ == 0) throw std::invalid_argument("nobody watches the changes");
    if (--readers_ != 0) return;
    blocks_.clear();
    blocks_.shrink_to_fit();
    free_ = block_end_ = nullptr;
    next_ = start_ = (next_ / kBlockChanges + 1) * kBlockChanges;  // no cursor of before is current
}

void ChangeLog::begin_block() {
    const std::size_t block = next_ / kBlockChanges % kBlocks;
    if (block >= blocks_.size()) blocks_.resize(block + 1);
    if (!blocks_[block]) blocks_[block] = std::make_unique_for_overwrite<Change[]>(kBlockChanges);
    free_ = blocks_[block].get();
    block_end_ = free_ + kBlockChanges;
}

ChangeBatch ChangeLog::read(std::uint64_t cursor, std::size_t most) const {
    ChangeBatch batch;
    if (readers_ == 0 || cursor < first() || cursor > next_) {
        batch.lost = true;
        batch.next_cursor = next_;
        return batch;
    }
    const std::uint64_t end = cursor + std::min<std::uint64_t>(next_ - cursor, most);
    batch.changes.resize(end - cursor);
    Change* to = batch.changes.data();
    for (std::uint64_t number = cursor; number < end;) {
        const std::uint64_t in_block = number % kBlockChanges;
        const std::uint64_t count = std::min(end - number, kBlockChanges - in_block);
        const Change* const from = &blocks_[number / kBlockChanges % kBlocks][in_block];
        to = std::copy_n(from, count, to);
        number += count;
    }
    batch.next_cursor = end;
    return batch;
}

std::size_t ChangeLog::memory_bytes() const {
    const auto used_blocks =
        std::count_if(blocks_.begin(), blocks_.end(), [](const auto& block) { return block != nullptr; });
    return static_cast<std::size_t>(used_blocks) * kBlockChanges * sizeof(Change);
}

// ---- pages ----------------------------------------------------------------------------------------------------------

ChangePage page_of(const ChangeBatch& batch) {
    ChangePage page;
    page.next_cursor = batch.next_cursor;
    page.lost = batch.lost;
    const std::size_t count = batch.changes.size();
    page.positions.reserve(count);
    page.hashes.reserve(count * kChunkHashBytes);
    page.sizes_bytes.reserve(count);
    page.added.reserve(count);
    std::unordered_map<Digest, std::uint32_t, DigestHash> positions;
    const Change* previous = nullptr;
    for (const Change& change : batch.changes) {
        if (previous != nullptr && previous->name_space == change.name_space) {
            page.positions.push_back(page.positions.back());
        } else {
            const auto [position, is_new] =
                positions.try_emplace(change.name_space, static_cast<std::uint32_t>(page.namespaces.size()));
            if (is_new) page.namespaces.push_back(change.name_space);
            page.positions.push_back(position->second);
        }
        previous = &change;
        page.hashes.insert(page.hashes.end(), change.hash.begin(), change.hash.end());
        page.sizes_bytes.push_back(change.size_bytes());
        page.added.push_back(change.added() ? 1 : 0);
    }
    return page;
}

std::vector<ObjectStates> last_states(const ChangePage& page) {
    const std::size_t count = page.positions.size();
    const auto hash_at = [&](std::size_t row) { return &page.hashes[row * kChunkHashBytes]; };
    const KeyHash hash_key;
    std::vector<std::uint32_t> rows(std::bit_ceil(2 * count + 1), 0);  // by key: 1 + the last one
    std::vector<std::uint8_t> is_last(count, 0);
    for (std::size_t row = count; row-- > 0;) {
        const std::uint32_t position = page.positions[row];
        std::size_t at = hash_key(position, hash_at(row)) & (rows.size() - 1);
        const auto is_other = [&](std::uint32_t later) {
            return page.positions[later] != position || std::memcmp(hash_at(later), hash_at(row), kChunkHashBytes) != 0;
        };
        while (rows[at] != 0 && is_other(rows[at] - 1)) at = (at + 1) & (rows.size() - 1);
        if (rows[at] != 0) continue;
        rows[at] = static_cast<std::uint32_t>(row + 1);
        is_last[row] = 1;
    }
    std::vector<ObjectStates> states(page.namespaces.size());
    for (std::size_t row = 0; row < count; ++row) {
        if (is_last[row] == 0) continue;
        ObjectStates& of = states[page.positions[row]];
        std::vector<std::uint8_t>& hashes = page.added[row] != 0 ? of.there : of.gone;
        hashes.insert(hashes.end(), hash_at(row), hash_at(row) + kChunkHashBytes);
        if (page.added[row] != 0) of.sizes_bytes.push_back(page.sizes_bytes[row]);
    }
    return states;
}

ChangedChunks changed_chunks(const ChangePage& page, std::span<const Digest> namespaces, std::size_t width) {
    if (width == 0 || namespaces.size() % width != 0) {
        throw std::invalid_argument("namespaces must be whole sets of `width`");
    }
    constexpr std::uint32_t kOfNoSet = ~std::uint32_t{0};
    std::unordered_map<Digest, std::uint32_t, DigestHash> sets;
    for (std::size_t i = 0; i < namespaces.size(); ++i) {
        sets.emplace(namespaces[i], static_cast<std::uint32_t>(i / width));
    }
    std::vector<std::uint32_t> set_of;  // by position in the page
    set_of.reserve(page.namespaces.size());
    for (const Digest& digest : page.namespaces) {
        const auto found = sets.find(digest);
        set_of.push_back(found == sets.end() ? kOfNoSet : found->second);
    }
    ChangedChunks changed;
    std::vector<std::unordered_set<std::string_view>> seen(namespaces.size() / width);
    for (std::size_t i = 0; i < page.positions.size(); ++i) {
        const std::uint32_t set = set_of[page.positions[i]];
        if (set == kOfNoSet) continue;
        const std::uint8_t* const hash = &page.hashes[i * kChunkHashBytes];
        if (!seen[set].emplace(reinterpret_cast<const char*>(hash), kChunkHashBytes).second) continue;
        changed.sets.push_back(set);
        changed.hashes.insert(changed.hashes.end(), hash, hash + kChunkHashBytes);
    }
    return changed;
}

}  // namespace lmcache
