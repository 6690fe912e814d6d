// The record of slots from which the next server recovers: for each unit of the arena one word in shared memory, which
// says whether a slot begins there, its length, and whether it holds an object or is being written, and by whom
// (docs/formats/shared_memory.md). Every change is one aligned 64-bit store, so the table is consistent at whatever
// instruction the process dies. Invariants, at every instruction:
//   - a resident word is there only while its whole extent holds a committed frame that nobody writes;
//   - a staged word is there from before its slot is handed out until its owner is known to write no more.
// Without memory the table records nothing. Not thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "lmcache/limits.h"

namespace lmcache {

class SlotTable {
public:
    struct Slot {
        std::uint32_t units;
        bool resident;        // else staged
        std::uint32_t value;  // resident: position in the order of uses; staged: the owner's number
    };

    // Longer slots are not recorded; no object is that large.
    static constexpr std::uint32_t kMaxUnits = (1U << 30) - 1;
    static_assert(kMaxObjectBytes / kFrameHeaderBytes + 1 < kMaxUnits);

    // `address` of one word a unit, zero at first; 0: keeps nothing.
    explicit SlotTable(std::uintptr_t address) : words_(reinterpret_cast<std::uint64_t*>(address)) {}

    void set_resident(std::uint32_t first, std::uint32_t units, std::uint32_t last_use) {
        set(first, kResident, units, last_use);
    }
    void set_staged(std::uint32_t first, std::uint32_t units, std::uint32_t owner) {
        set(first, kStaged, units, owner);
    }
    void clear(std::uint32_t first) {
        if (words_ != nullptr) word(first).store(0, std::memory_order_release);
    }

    // The slot that begins there by its word; nullopt for a word that describes none.
    std::optional<Slot> at(std::uint32_t first) const {
        if (words_ == nullptr) return std::nullopt;
        const std::uint64_t value = word(first).load(std::memory_order_acquire);
        const std::uint64_t kind = value >> kKindShift;
        const auto units = static_cast<std::uint32_t>(value >> 32) & kMaxUnits;
        if ((kind != kResident && kind != kStaged) || units == 0) return std::nullopt;
        return Slot{units, kind == kResident, static_cast<std::uint32_t>(value)};
    }
    bool is_zero(std::uint32_t first) const {
        return words_ == nullptr || word(first).load(std::memory_order_relaxed) == 0;
    }

    explicit operator bool() const { return words_ != nullptr; }

private:
    static constexpr std::uint64_t kResident = 1;
    static constexpr std::uint64_t kStaged = 2;
    static constexpr int kKindShift = 62;

    std::atomic_ref<std::uint64_t> word(std::uint32_t first) const { return std::atomic_ref(words_[first]); }
    void set(std::uint32_t first, std::uint64_t kind, std::uint32_t units, std::uint32_t value) {
        if (words_ == nullptr) return;
        const std::uint64_t recorded = units <= kMaxUnits ? kind << kKindShift | std::uint64_t{units} << 32 | value : 0;
        word(first).store(recorded, std::memory_order_release);
    }

    std::uint64_t* words_;
};

}  // namespace lmcache
