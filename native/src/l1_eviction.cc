// Making room: who goes, and how free memory that is scattered becomes one extent again.
#include "lmcache/l1_core.h"

namespace lmcache {

namespace {

constexpr std::uint32_t kMaxWindows = 8;          // compared before the best is taken
constexpr std::size_t kMaxObjectsCompared = 128;  // in all of them, so that making room stays cheap

constexpr std::size_t kObjectsAtOnce = 512;  // about a quarter of a millisecond

}  // namespace

bool L1Core::is_evictable(std::uint32_t index) const {
    return objects_[index].state == ObjectState::kResident && objects_[index].readers == 0;
}

std::optional<std::uint32_t> L1Core::allocate(std::uint32_t units, std::uint32_t index) {
    auto first = arena_.allocate(units, index);
    if (first || !options_.evicts) return first;
    if (units > arena_.free_units() + lru_.units()) return std::nullopt;  // evicting everything would not help
    while (!first && lru_.oldest() != kNoObject) {
        const std::uint32_t oldest = lru_.oldest();
        if (objects_[oldest].units == units) {  // the usual case, kept short: its memory changes hands as it is
            first = objects_[oldest].first_unit;
            arena_.reassign(*first, oldest, index);
            leave_lru(oldest);
            forget(oldest);
            return first;
        }
        const auto window = objects_[oldest].units < units ? best_window(units) : std::nullopt;
        if (window) {
            for (const std::uint32_t victim : window->objects) evict_one(victim);
        } else {
            evict_one(oldest);
        }
        first = arena_.allocate(units, index);
    }
    return first;
}

// With objects of one size the window is the oldest object alone: plain LRU. With mixed sizes it costs about as many
// bytes as are needed, where evicting by age alone would free scattered extents until nearly everything is gone.
std::optional<L1Core::Window> L1Core::best_window(std::uint32_t units) const {
    std::optional<Window> best;
    std::size_t compared = 0;
    std::uint32_t base = lru_.oldest();
    for (std::uint32_t tried = 0; tried < kMaxWindows && base != kNoObject; ++tried, base = objects_[base].newer) {
        auto window = window_around(base, units);
        if (!window) continue;
        compared += window->objects.size();
        if (!best || lru_.is_older(window->youngest, best->youngest)) best = std::move(window);
        if (best->objects.size() == 1 || compared >= kMaxObjectsCompared) break;
    }
    return best;
}

std::optional<L1Core::Window> L1Core::window_around(std::uint32_t index, std::uint32_t units) const {
    Window window;
    const auto add = [&](std::uint32_t object) {
        window.objects.push_back(object);
        if (window.youngest == kNoObject || lru_.is_older(window.youngest, object)) window.youngest = object;
    };
    add(index);
    std::uint32_t begin = objects_[index].first_unit;
    std::uint32_t end = begin + objects_[index].units;
    while (true) {
        auto left = arena_.extent_before(begin);
        if (left && left->tenant == Arena::kFree) {
            begin = left->first;
            left = arena_.extent_before(begin);
        }
        auto right = arena_.extent_at(end);
        if (right && right->tenant == Arena::kFree) {
            end = right->end();
            right = arena_.extent_at(end);
        }
        if (end - begin >= units) return window;
        const bool can_go_left = left && is_evictable(left->tenant);
        const bool can_go_right = right && is_evictable(right->tenant);
        if (!can_go_left && !can_go_right) return std::nullopt;
        if (can_go_left && (!can_go_right || lru_.is_older(left->tenant, right->tenant))) {
            add(left->tenant);
            begin = left->first;
        } else {
            add(right->tenant);
            end = right->end();
        }
    }
}

void L1Core::prefetch_eviction(std::uint32_t index) const {
    // The records of the next ones are there already from earlier calls; their keys and places are fetched one ahead,
    // and another record further ahead.
    constexpr int kRecordsAhead = 4;
    for (int ahead = 0; ahead < kRecordsAhead; ++ahead) {
        index = objects_[index].newer;
        if (index == kNoObject) return;
        if (ahead == 1) {
            keys_.prefetch(hash_object(objects_[index]));
            arena_.prefetch(objects_[index].first_unit);
        }
    }
    objects_.prefetch(index);
}

void L1Core::enter_lru(std::uint32_t index) {
    lru_.push_newest(index);
    const Object& object = objects_[index];
    if (!object.temporary) slots_.set_resident(object.first_unit, object.units, object.last_use);
}

void L1Core::leave_lru(std::uint32_t index) {
    prefetch_eviction(index);
    lru_.unlink(index);
    ++evicted_objects_;
    evicted_units_ += objects_[index].units;
}

std::uint32_t L1Core::evict_one(std::uint32_t index) {
    const std::uint32_t units = objects_[index].units;
    leave_lru(index);
    erase(index);
    return units;
}

Removed L1Core::evict(std::uint64_t target_bytes) {
    const std::lock_guard lock(mutex_);
    Removed removed;
    while (options_.evicts && removed.size_bytes < target_bytes && lru_.oldest() != kNoObject) {
        removed.size_bytes += bytes(evict_one(lru_.oldest()));
        if (++removed.objects % kObjectsAtOnce == 0) mutex_.let_others_in();
    }
    return removed;
}

Removed L1Core::clear() {
    const std::lock_guard lock(mutex_);
    Removed removed;
    for (std::uint32_t index = 0; index < objects_.size(); ++index) {
        if (index % kObjectsAtOnce == kObjectsAtOnce - 1) mutex_.let_others_in();
        Object& object = objects_[index];
        if (object.state != ObjectState::kResident) continue;
        if (object.readers != 0) {
            keys_.erase(hash_object(object), index);
            --resident_;
            object.state = ObjectState::kDetached;
            slots_.clear(object.first_unit);
            continue;
        }
        removed.size_bytes += bytes(object.units);
        ++removed.objects;
        lru_.unlink(index);
        erase(index);
    }
    return removed;
}

}  // namespace lmcache
