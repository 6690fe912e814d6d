#include "lmcache/sorted_keys.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace lmcache {

std::size_t SortedKeys::block_of(std::uint64_t key) const {
    const auto after = std::upper_bound(firsts_.begin(), firsts_.end(), key);
    return after == firsts_.begin() ? 0 : static_cast<std::size_t>(after - firsts_.begin()) - 1;
}

void SortedKeys::insert(std::uint64_t key) {
    if (blocks_.empty()) {
        blocks_.push_back(std::make_unique<Block>());
        firsts_.push_back(key);
    }
    std::size_t position = block_of(key);
    if (blocks_[position]->count == kBlockKeys) {
        split(position);
        if (key >= firsts_[position + 1]) ++position;
    }
    Block& block = *blocks_[position];
    std::uint64_t* end = block.keys + block.count;
    std::uint64_t* place = std::lower_bound(block.keys, end, key);
    if (place != end && *place == key) throw std::logic_error("SortedKeys: key inserted twice");
    std::memmove(place + 1, place, sizeof(key) * static_cast<std::size_t>(end - place));
    *place = key;
    ++block.count;
    ++size_;
    firsts_[position] = block.keys[0];
}

void SortedKeys::erase(std::uint64_t key) {
    const auto cursor = at_or_after(key);
    if (!cursor || (*this)[*cursor] != key) throw std::logic_error("SortedKeys: erased key is not there");
    erase(*cursor);
}

void SortedKeys::erase(Cursor cursor) {
    const std::size_t position = cursor.block;
    Block& block = *blocks_[position];
    std::uint64_t* place = block.keys + cursor.place;
    std::memmove(place, place + 1, sizeof(*place) * (block.count - cursor.place - 1));
    --block.count;
    --size_;
    if (block.count == 0) {
        drop_block(position);
        return;
    }
    firsts_[position] = block.keys[0];
    // Blocks that run empty are joined, so that memory follows the number of keys.
    if (block.count >= kBlockKeys / 4) return;
    if (position + 1 < blocks_.size() && block.count + blocks_[position + 1]->count <= kBlockKeys / 2) {
        merge_with_next(position);
    } else if (position > 0 && block.count + blocks_[position - 1]->count <= kBlockKeys / 2) {
        merge_with_next(position - 1);
    }
}

void SortedKeys::replace(Cursor cursor, std::uint64_t key) {
    blocks_[cursor.block]->keys[cursor.place] = key;
    firsts_[cursor.block] = blocks_[cursor.block]->keys[0];
}

std::optional<SortedKeys::Cursor> SortedKeys::at_or_after(std::uint64_t key) const {
    if (blocks_.empty()) return std::nullopt;
    const std::size_t position = block_of(key);
    const Block& block = *blocks_[position];
    const std::uint64_t* place = std::lower_bound(block.keys, block.keys + block.count, key);
    if (place != block.keys + block.count) return Cursor{position, static_cast<std::uint32_t>(place - block.keys)};
    if (position + 1 < blocks_.size()) return Cursor{position + 1, 0};
    return std::nullopt;
}

std::optional<SortedKeys::Cursor> SortedKeys::next(Cursor cursor) const {
    if (cursor.place + 1 < blocks_[cursor.block]->count) return Cursor{cursor.block, cursor.place + 1};
    if (cursor.block + 1 < blocks_.size()) return Cursor{cursor.block + 1, 0};
    return std::nullopt;
}

std::optional<SortedKeys::Cursor> SortedKeys::previous(Cursor cursor) const {
    if (cursor.place > 0) return Cursor{cursor.block, cursor.place - 1};
    if (cursor.block > 0) return Cursor{cursor.block - 1, blocks_[cursor.block - 1]->count - 1};
    return std::nullopt;
}

std::optional<SortedKeys::Cursor> SortedKeys::last() const {
    if (blocks_.empty()) return std::nullopt;
    return Cursor{blocks_.size() - 1, blocks_.back()->count - 1};
}

void SortedKeys::prefetch(std::uint64_t key) const {
    if (blocks_.empty()) return;
    const auto* block = reinterpret_cast<const char*>(blocks_[block_of(key)].get());
    for (std::size_t line = 0; line < sizeof(Block); line += 64) __builtin_prefetch(block + line, 1);
}

std::size_t SortedKeys::memory_bytes() const {
    return blocks_.size() * sizeof(Block) + blocks_.capacity() * sizeof(blocks_[0]) +
           firsts_.capacity() * sizeof(firsts_[0]);
}

void SortedKeys::check() const {
    std::size_t count = 0;
    std::optional<std::uint64_t> before;
    if (blocks_.size() != firsts_.size()) throw std::runtime_error("SortedKeys: directory and blocks differ");
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
        if (blocks_[i]->count == 0) throw std::runtime_error("SortedKeys: empty block");
        if (blocks_[i]->keys[0] != firsts_[i]) throw std::runtime_error("SortedKeys: directory is stale");
    }
    for_each([&](std::uint64_t key) {
        if (before && key <= *before) throw std::runtime_error("SortedKeys: keys do not ascend");
        before = key;
        ++count;
    });
    if (count != size_) throw std::runtime_error("SortedKeys: count is wrong");
}

void SortedKeys::split(std::size_t position) {
    auto upper = std::make_unique<Block>();
    Block& lower = *blocks_[position];
    const std::uint32_t kept = lower.count / 2;
    upper->count = lower.count - kept;
    std::memcpy(upper->keys, lower.keys + kept, sizeof(std::uint64_t) * upper->count);
    firsts_.insert(firsts_.begin() + static_cast<std::ptrdiff_t>(position) + 1, upper->keys[0]);
    blocks_.insert(blocks_.begin() + static_cast<std::ptrdiff_t>(position) + 1, std::move(upper));
    lower.count = kept;
}

void SortedKeys::merge_with_next(std::size_t position) {
    Block& lower = *blocks_[position];
    const Block& upper = *blocks_[position + 1];
    std::memcpy(lower.keys + lower.count, upper.keys, sizeof(std::uint64_t) * upper.count);
    lower.count += upper.count;
    drop_block(position + 1);
}

void SortedKeys::drop_block(std::size_t position) {
    blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(position));
    firsts_.erase(firsts_.begin() + static_cast<std::ptrdiff_t>(position));
}

}  // namespace lmcache
