// Hands out extents of an address range, in units of the alignment, and knows what lies beside what. It never touches
// the memory itself. Best fit, lowest address first; free neighbours are one extent. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "lmcache/sorted_keys.h"

namespace lmcache {

class Arena {
public:
    static constexpr std::uint32_t kFree = ~std::uint32_t{0};

    struct Extent {
        std::uint32_t first;
        std::uint32_t units;
        std::uint32_t tenant;  // kFree, or the number that allocate was given
        std::uint32_t end() const { return first + units; }
    };

    explicit Arena(std::uint32_t capacity_units) : capacity_(capacity_units) {}

    // Units [0, committed) may be handed out. Only grows; a smaller value changes nothing.
    void set_committed(std::uint32_t committed_units);

    // First unit of an extent of that size, or nothing. `units` > 0, `tenant` != kFree.
    std::optional<std::uint32_t> allocate(std::uint32_t units, std::uint32_t tenant);
    // That very extent, if all of it is free; else false and nothing has changed.
    bool allocate_at(std::uint32_t first, std::uint32_t units, std::uint32_t tenant);
    // The extent must be allocated: first unit and tenant as they were handed out, else std::logic_error.
    void free(std::uint32_t first, std::uint32_t tenant);

    // The same extent for another tenant.
    void reassign(std::uint32_t first, std::uint32_t tenant, std::uint32_t new_tenant);

    // The extent that ends where `unit` begins, and the one that begins there. None at the ends of the committed range.
    std::optional<Extent> extent_before(std::uint32_t unit) const;
    std::optional<Extent> extent_at(std::uint32_t unit) const;

    std::uint32_t capacity() const { return capacity_; }
    std::uint32_t committed() const { return committed_; }
    std::uint32_t free_units() const { return free_; }
    std::uint32_t used_units() const { return committed_ - free_; }
    std::uint32_t largest_free() const;
    std::size_t memory_bytes() const { return extents_.memory_bytes() + free_by_size_.memory_bytes(); }
    void prefetch(std::uint32_t first) const { extents_.prefetch(pack(first, 0)); }

    void check() const;

    // Visits every extent by address; together they are [0, committed).
    template <typename Visit>
    void for_each(Visit&& visit) const {
        std::optional<std::uint64_t> before;
        extents_.for_each([&](std::uint64_t key) {
            if (before) visit(Extent{high(*before), high(key) - high(*before), low(*before)});
            before = key;
        });
        if (before) visit(Extent{high(*before), committed_ - high(*before), low(*before)});
    }

private:
    static std::uint64_t pack(std::uint32_t high, std::uint32_t low) { return std::uint64_t{high} << 32 | low; }
    static std::uint32_t high(std::uint64_t key) { return static_cast<std::uint32_t>(key >> 32); }
    static std::uint32_t low(std::uint64_t key) { return static_cast<std::uint32_t>(key); }

    SortedKeys::Cursor find(std::uint32_t first, std::uint32_t tenant) const;
    Extent extent(SortedKeys::Cursor cursor) const;

    std::uint32_t capacity_;
    std::uint32_t committed_ = 0;
    std::uint32_t free_ = 0;
    SortedKeys extents_;       // (first, tenant); each ends where the next begins
    SortedKeys free_by_size_;  // (units, first) of the free ones
};

}  // namespace lmcache
