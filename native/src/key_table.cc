#include "lmcache/key_table.h"

#include <stdexcept>
#include <utility>

namespace lmcache {

KeyTable::KeyTable() {
    for (Part& part : parts_) {
        part.slots = std::make_unique<Slot[]>(kFirstSlots);
        part.mask = kFirstSlots - 1;
    }
}

void KeyTable::insert(std::uint64_t hash, std::uint32_t index) {
    Part& part = part_of(hash);
    // From 55 to 78 % full, so that the parts, which fill up at the same pace, do not all grow in the same few calls.
    const std::uint64_t most = 141 + (hash >> 56) * 59 / 256;
    if (256 * (std::uint64_t{part.count} + 1) > most * (std::uint64_t{part.mask} + 1)) grow(part);
    place(part, std::uint64_t{tag_of(hash)} << 32 | (index + 1));
    ++part.count;
}

void KeyTable::erase(std::uint64_t hash, std::uint32_t index) {
    Part& part = part_of(hash);
    const Slot slot = std::uint64_t{tag_of(hash)} << 32 | (index + 1);
    std::uint32_t hole = tag_of(hash) & part.mask;
    while (part.slots[hole] != slot) {
        if (part.slots[hole] == kEmpty) throw std::logic_error("KeyTable: erased key is not there");
        hole = (hole + 1) & part.mask;
    }
    // Later slots of the run move back over the hole unless that would put them before their home.
    for (std::uint32_t at = (hole + 1) & part.mask; part.slots[at] != kEmpty; at = (at + 1) & part.mask) {
        const std::uint32_t home = tag_of_slot(part.slots[at]) & part.mask;
        if (((at - home) & part.mask) >= ((at - hole) & part.mask)) {
            part.slots[hole] = part.slots[at];
            hole = at;
        }
    }
    part.slots[hole] = kEmpty;
    --part.count;
}

std::size_t KeyTable::size() const {
    std::size_t total = 0;
    for (const Part& part : parts_) total += part.count;
    return total;
}

std::size_t KeyTable::memory_bytes() const {
    std::size_t total = sizeof(*this);
    for (const Part& part : parts_) total += (std::size_t{part.mask} + 1) * sizeof(Slot);
    return total;
}

void KeyTable::place(Part& part, Slot slot) {
    std::uint32_t at = tag_of_slot(slot) & part.mask;
    while (part.slots[at] != kEmpty) at = (at + 1) & part.mask;
    part.slots[at] = slot;
}

void KeyTable::grow(Part& part) {
    const std::uint32_t old_mask = part.mask;
    const std::unique_ptr<Slot[]> old =
        std::exchange(part.slots, std::make_unique<Slot[]>(2 * (std::size_t{old_mask} + 1)));
    part.mask = 2 * old_mask + 1;
    for (std::uint32_t i = 0; i <= old_mask; ++i) {
        if (old[i] != kEmpty) place(part, old[i]);
    }
}

}  // namespace lmcache
