// An ordered set of 64-bit keys in blocks: about 12 bytes a key, cheap to search because the directory of blocks is one
// array, and cheap to walk. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace lmcache {

class SortedKeys {
public:
    // Where a key is; good until the next insert or erase.
    struct Cursor {
        std::size_t block;
        std::uint32_t place;
    };

    // `key` must not be in the set.
    void insert(std::uint64_t key);
    // `key` must be in the set.
    void erase(std::uint64_t key);
    void erase(Cursor cursor);
    // Puts another key in that place, which must keep the order.
    void replace(Cursor cursor, std::uint64_t key);

    // The smallest key >= `key`.
    std::optional<Cursor> at_or_after(std::uint64_t key) const;
    std::optional<Cursor> next(Cursor cursor) const;
    std::optional<Cursor> previous(Cursor cursor) const;
    std::optional<Cursor> last() const;
    std::uint64_t operator[](Cursor cursor) const { return blocks_[cursor.block]->keys[cursor.place]; }
    // Fetches what a search for `key` will read.
    void prefetch(std::uint64_t key) const;

    std::size_t size() const { return size_; }
    std::size_t memory_bytes() const;
    // Throws std::runtime_error that names the broken invariant.
    void check() const;

    template <typename Visit>
    void for_each(Visit&& visit) const {
        for (const auto& block : blocks_) {
            for (std::uint32_t i = 0; i < block->count; ++i) visit(block->keys[i]);
        }
    }

private:
    static constexpr std::uint32_t kBlockKeys = 127;

    struct alignas(64) Block {
        std::uint32_t count = 0;
        std::uint64_t keys[kBlockKeys];
    };

    // The block that holds `key` or would.
    std::size_t block_of(std::uint64_t key) const;
    void split(std::size_t position);
    void merge_with_next(std::size_t position);
    void drop_block(std::size_t position);

    // Invariant: no block is empty; firsts_[i] == blocks_[i]->keys[0]; keys ascend within and across blocks.
    std::vector<std::unique_ptr<Block>> blocks_;
    std::vector<std::uint64_t> firsts_;
    std::size_t size_ = 0;
};

}  // namespace lmcache
