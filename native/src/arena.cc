#include "lmcache/arena.h"

#include <stdexcept>

namespace lmcache {

void Arena::set_committed(std::uint32_t committed_units) {
    if (committed_units > capacity_) throw std::invalid_argument("committed memory is larger than the capacity");
    if (committed_units <= committed_) return;
    const std::uint32_t added = committed_units - committed_;
    const auto last = extents_.last();
    if (last && low(extents_[*last]) == kFree) {
        const Extent tail = extent(*last);
        free_by_size_.erase(pack(tail.units, tail.first));
        free_by_size_.insert(pack(tail.units + added, tail.first));
    } else {
        extents_.insert(pack(committed_, kFree));
        free_by_size_.insert(pack(added, committed_));
    }
    committed_ = committed_units;
    free_ += added;
}

std::optional<std::uint32_t> Arena::allocate(std::uint32_t units, std::uint32_t tenant) {
    const auto fit = free_by_size_.at_or_after(pack(units, 0));
    if (!fit) return std::nullopt;
    const std::uint32_t found = high(free_by_size_[*fit]);
    const std::uint32_t first = low(free_by_size_[*fit]);
    free_by_size_.erase(*fit);
    extents_.replace(*extents_.at_or_after(pack(first, 0)), pack(first, tenant));
    if (found > units) {
        extents_.insert(pack(first + units, kFree));
        free_by_size_.insert(pack(found - units, first + units));
    }
    free_ -= units;
    return first;
}

bool Arena::allocate_at(std::uint32_t first, std::uint32_t units, std::uint32_t tenant) {
    if (units == 0 || units > committed_ || first > committed_ - units) return false;
    auto cursor = extents_.at_or_after(pack(first, 0));
    if (!cursor || high(extents_[*cursor]) != first) cursor = cursor ? extents_.previous(*cursor) : extents_.last();
    const Extent around = extent(*cursor);  // there is one: extents cover the committed range
    const std::uint32_t end = first + units;
    if (around.tenant != kFree || end > around.end()) return false;
    free_by_size_.erase(pack(around.units, around.first));
    if (around.first == first) {
        extents_.replace(*cursor, pack(first, tenant));
    } else {
        free_by_size_.insert(pack(first - around.first, around.first));
        extents_.insert(pack(first, tenant));
    }
    if (around.end() != end) {
        extents_.insert(pack(end, kFree));
        free_by_size_.insert(pack(around.end() - end, end));
    }
    free_ -= units;
    return true;
}

void Arena::free(std::uint32_t first, std::uint32_t tenant) {
    const auto cursor = find(first, tenant);
    const Extent freed = extent(cursor);
    std::uint32_t start = first;
    std::uint32_t units = freed.units;
    const auto left = extents_.previous(cursor);
    const bool joins_left = left && low(extents_[*left]) == kFree;
    const auto right = extents_.next(cursor);
    const bool joins_right = right && low(extents_[*right]) == kFree;
    if (joins_left) {
        start = high(extents_[*left]);
        free_by_size_.erase(pack(first - start, start));
        units += first - start;
    }
    if (joins_right) {
        const Extent next = extent(*right);
        free_by_size_.erase(pack(next.units, next.first));
        units += next.units;
    }
    extents_.replace(cursor, pack(first, kFree));
    if (joins_right) extents_.erase(*right);  // the later one first: erasing moves what follows
    if (joins_left) extents_.erase(pack(first, kFree));
    free_by_size_.insert(pack(units, start));
    free_ += freed.units;
}

void Arena::reassign(std::uint32_t first, std::uint32_t tenant, std::uint32_t new_tenant) {
    extents_.replace(find(first, tenant), pack(first, new_tenant));
}

std::optional<Arena::Extent> Arena::extent_before(std::uint32_t unit) const {
    const auto here = extents_.at_or_after(pack(unit, 0));
    const auto before = here ? extents_.previous(*here) : extents_.last();
    if (!before) return std::nullopt;
    return extent(*before);
}

std::optional<Arena::Extent> Arena::extent_at(std::uint32_t unit) const {
    const auto here = extents_.at_or_after(pack(unit, 0));
    if (!here) return std::nullopt;
    return extent(*here);
}

std::uint32_t Arena::largest_free() const {
    const auto largest = free_by_size_.last();
    return largest ? high(free_by_size_[*largest]) : 0;
}

SortedKeys::Cursor Arena::find(std::uint32_t first, std::uint32_t tenant) const {
    const auto cursor = extents_.at_or_after(pack(first, 0));
    if (!cursor || extents_[*cursor] != pack(first, tenant))
        throw std::logic_error("Arena: that extent is not allocated");
    return *cursor;
}

Arena::Extent Arena::extent(SortedKeys::Cursor cursor) const {
    const std::uint64_t key = extents_[cursor];
    const auto next = extents_.next(cursor);
    const std::uint32_t end = next ? high(extents_[*next]) : committed_;
    return {high(key), end - high(key), low(key)};
}

void Arena::check() const {
    extents_.check();
    free_by_size_.check();
    std::uint64_t total = 0;
    std::size_t free_extents = 0;
    std::uint32_t end = 0;
    bool after_free = false;
    for_each([&](const Extent& extent) {
        if (extent.units == 0 || extent.first != end) throw std::runtime_error("Arena: extents leave a gap");
        end = extent.end();
        const bool is_free = extent.tenant == kFree;
        if (is_free && after_free) throw std::runtime_error("Arena: free neighbours are not joined");
        after_free = is_free;
        if (!is_free) return;
        const auto entry = free_by_size_.at_or_after(pack(extent.units, extent.first));
        if (!entry || free_by_size_[*entry] != pack(extent.units, extent.first)) {
            throw std::runtime_error("Arena: a free extent is missing in the order by size");
        }
        total += extent.units;
        ++free_extents;
    });
    if (end != committed_) throw std::runtime_error("Arena: extents do not end where the committed memory ends");
    if (free_extents != free_by_size_.size()) throw std::runtime_error("Arena: the order by size has stale entries");
    if (total != free_) throw std::runtime_error("Arena: free units are miscounted");
}

}  // namespace lmcache
