// From the 64-bit hash of a key to the index of its object. Open addressing in 256 small parts, each of which grows on
// its own, so that growth never stops a call for long. Keys themselves live with the objects. Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "lmcache/object_pool.h"

namespace lmcache {

class KeyTable {
public:
    KeyTable();

    // Index for which `matches(index)` holds, or kNoObject.
    template <typename Matches>
    std::uint32_t find(std::uint64_t hash, Matches&& matches) const {
        const Part& part = part_of(hash);
        for (std::uint32_t at = tag_of(hash) & part.mask; part.slots[at] != kEmpty; at = (at + 1) & part.mask) {
            if (tag_of_slot(part.slots[at]) == tag_of(hash) && matches(index_of_slot(part.slots[at]))) {
                return index_of_slot(part.slots[at]);
            }
        }
        return kNoObject;
    }

    // The key must not be in the table.
    void insert(std::uint64_t hash, std::uint32_t index);
    // (hash, index) must be in the table.
    void erase(std::uint64_t hash, std::uint32_t index);

    void prefetch(std::uint64_t hash) const {
        const Part& part = part_of(hash);
        __builtin_prefetch(&part.slots[tag_of(hash) & part.mask]);
    }
    // The first index whose tag fits, unverified: what to prefetch next.
    std::uint32_t candidate(std::uint64_t hash) const {
        return find(hash, [](std::uint32_t) { return true; });
    }

    std::size_t size() const;
    std::size_t memory_bytes() const;

private:
    // A slot is tag << 32 | (index + 1). The tag is the low half of the hash and gives the home position; the part
    // comes from the high bits, so growing and erasing never look at an object.
    using Slot = std::uint64_t;
    static constexpr Slot kEmpty = 0;
    static constexpr std::uint32_t kFirstSlots = 16;

    struct Part {
        std::unique_ptr<Slot[]> slots;
        std::uint32_t mask = 0;
        std::uint32_t count = 0;
    };

    static std::uint32_t tag_of(std::uint64_t hash) { return static_cast<std::uint32_t>(hash); }
    static std::uint32_t tag_of_slot(Slot slot) { return static_cast<std::uint32_t>(slot >> 32); }
    static std::uint32_t index_of_slot(Slot slot) { return static_cast<std::uint32_t>(slot) - 1; }
    static void place(Part& part, Slot slot);
    static void grow(Part& part);

    Part& part_of(std::uint64_t hash) { return parts_[hash >> 56]; }
    const Part& part_of(std::uint64_t hash) const { return parts_[hash >> 56]; }

    std::array<Part, 256> parts_;
};

}  // namespace lmcache
