// Frames of the previous server in shared memory, found by its slot table. A frame counts only where its own header
// agrees with the table. Payloads are not read: whoever copies one verifies it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lmcache/claim_table.h"
#include "lmcache/namespaces.h"
#include "lmcache/slot_table.h"

namespace lmcache {

struct RecoveredFrame {
    std::array<std::uint8_t, kChunkHashBytes> hash;
    std::uint32_t name_space;  // index into RecoveredFrames::namespaces
    std::uint32_t first_unit;
    std::uint32_t units;
    std::uint32_t last_use;
};

// A namespace as headers have it. The caller checks that the digest is that of `encoded`.
struct RecoveredNamespace {
    Digest digest;
    std::vector<std::uint8_t> encoded;
};

// A slot that was reserved and not committed.
struct UncommittedSlot {
    std::uint32_t first_unit;
    std::uint32_t units;
    Owner owner;
};

struct RecoveredFrames {
    std::vector<RecoveredFrame> frames;  // by address; disjoint, also from `slots`
    std::vector<UncommittedSlot> slots;  // by address, disjoint
    std::vector<RecoveredNamespace> namespaces;
    std::vector<std::uint32_t> refused;  // units whose word describes none of these
};

// An owner as a word of the table holds it, and back. The storage loop's number, -1, is the largest word.
inline std::uint32_t owner_word(Owner owner) { return static_cast<std::uint32_t>(owner); }
inline Owner word_owner(std::uint32_t word) { return word == ~std::uint32_t{0} ? Owner{-1} : Owner{word}; }

// Reads the first `committed_units` units of the table on up to `threads` threads. `arena` is the address of unit 0.
// The table must not change during the call.
RecoveredFrames recover_frames(const SlotTable& table, const std::byte* arena, std::uint32_t committed_units,
                               std::uint64_t align_bytes, std::size_t threads);

}  // namespace lmcache
