// What a former server left in shared memory, found by its slot table and believed only where the frame's own header
// says the same. Payloads are not looked at: whoever copies one verifies it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lmcache/claim_table.h"
#include "lmcache/namespaces.h"
#include "lmcache/slot_table.h"

namespace lmcache {

struct LeftFrame {
    std::array<std::uint8_t, kChunkHashBytes> hash;
    std::uint32_t name_space;  // index into LeftFrames::namespaces
    std::uint32_t first_unit;
    std::uint32_t units;
    std::uint32_t last_use;
};

// As the headers have it: that the digest is that of the bytes is for the caller to see.
struct LeftNamespace {
    Digest digest;
    std::vector<std::uint8_t> encoded;
};

// A slot that was handed out and not committed.
struct LeftSlot {
    std::uint32_t first_unit;
    std::uint32_t units;
    Owner owner;
};

struct LeftFrames {
    std::vector<LeftFrame> frames;  // by address; they overlap neither each other nor `slots`
    std::vector<LeftSlot> slots;    // by address, apart from each other
    std::vector<LeftNamespace> namespaces;
    std::vector<std::uint32_t> refused;  // units with a word that is none of these
};

// How an owner stands in a word of the table, and back. The storage loop's own number, -1, is the largest.
inline std::uint32_t owner_word(Owner owner) { return static_cast<std::uint32_t>(owner); }
inline Owner word_owner(std::uint32_t word) { return word == ~std::uint32_t{0} ? Owner{-1} : Owner{word}; }

// Looks through the first `committed_units` units in up to `threads` threads. `arena` is where unit 0 lies; nobody may
// change the table meanwhile.
LeftFrames find_left_frames(const SlotTable& table, const std::byte* arena, std::uint32_t committed_units,
                            std::uint64_t align_bytes, std::size_t threads);

}  // namespace lmcache
