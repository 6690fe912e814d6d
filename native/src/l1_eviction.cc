// Making room: who goes, and how free memory that is scattered becomes one extent again.
#include <limits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lmcache/l1_core.h"

namespace lmcache {

namespace {

constexpr std::uint32_t kMaxWindows = 8;          // compared before the best is taken
constexpr std::size_t kMaxObjectsCompared = 128;  // in all of them, so that making room stays cheap

constexpr std::size_t kMostOverusesKept = 256;  // until they are taken

constexpr std::size_t kObjectsAtOnce = 512;  // about a quarter of a millisecond

}  // namespace

bool L1Core::is_evictable(std::uint32_t index) const {
    return objects_[index].state == ObjectState::kResident && objects_[index].readers == 0;
}

void L1Core::note_overuse(std::uint32_t name_space) {
    const std::uint32_t salt = namespaces_.salt_of(name_space);
    if (overuses_.size() == kMostOverusesKept || !namespaces_.note(salt)) return;
    overuses_.push_back({namespaces_.text_of_salt(salt), bytes(order_.limit_of(salt))});
}

std::optional<std::uint32_t> L1Core::allocate(std::uint32_t units, std::uint32_t index, std::uint32_t name_space) {
    const bool would_exceed = order_.would_exceed(name_space, units);
    if (would_exceed) note_overuse(name_space);
    auto first = arena_.allocate(units, index);
    if (first || !order_.evicts()) return first;
    if (units > arena_.free_units() + order_.evictable_units_for(name_space, units)) return std::nullopt;
    while (!first) {
        const std::uint32_t victim = order_.victim_for(name_space, units);
        if (victim == kNoObject) break;
        if (objects_[victim].units == units) {  // the usual case, kept short: its memory changes hands as it is
            first = objects_[victim].first_unit;
            arena_.reassign(*first, victim, index);
            count_eviction(victim);
            forget(victim);
            return first;
        }
        // A window would cost other salts more than what they have beyond their limits.
        const bool may_take_many =
            !would_exceed || namespaces_.salt_of(objects_[victim].name_space) == namespaces_.salt_of(name_space);
        const auto window = may_take_many && objects_[victim].units < units ? best_window(victim, units) : std::nullopt;
        if (window) {
            for (const std::uint32_t object : window->objects) evict_one(object);
        } else {
            evict_one(victim);
        }
        first = arena_.allocate(units, index);
    }
    return first;
}

// With objects of one size the window is the oldest object alone. With mixed sizes it costs about as many bytes as are
// needed, where evicting by age alone would free scattered extents until nearly everything is gone.
std::optional<L1Core::Window> L1Core::best_window(std::uint32_t oldest, std::uint32_t units) const {
    std::optional<Window> best;
    std::size_t compared = 0;
    std::uint32_t base = oldest;
    for (std::uint32_t tried = 0; tried < kMaxWindows && base != kNoObject; ++tried, base = objects_[base].newer) {
        if (!is_evictable(base)) continue;
        auto window = window_around(base, units);
        if (!window) continue;
        compared += window->objects.size();
        if (!best || order_.is_older(window->youngest, best->youngest)) best = std::move(window);
        if (best->objects.size() == 1 || compared >= kMaxObjectsCompared) break;
    }
    return best;
}

std::optional<L1Core::Window> L1Core::window_around(std::uint32_t index, std::uint32_t units) const {
    Window window;
    const auto add = [&](std::uint32_t object) {
        mutex_.assert_held();
        window.objects.push_back(object);
        if (window.youngest == kNoObject || order_.is_older(window.youngest, object)) window.youngest = object;
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
        const bool can_go_left = left && is_evictable(left->tenant) && order_.may_go_together(index, left->tenant);
        const bool can_go_right = right && is_evictable(right->tenant) && order_.may_go_together(index, right->tenant);
        if (!can_go_left && !can_go_right) return std::nullopt;
        if (can_go_left && (!can_go_right || order_.is_older(left->tenant, right->tenant))) {
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
            const std::uint64_t key_hash = hash_object(objects_[index]);
            keys_.prefetch(key_hash);
            order_.prefetch_evicted(key_hash);
            fates_.prefetch(fate_key(namespaces_.digest_of(objects_[index].name_space), objects_[index].hash.data()));
            arena_.prefetch(objects_[index].first_unit);
        }
    }
    objects_.prefetch(index);
}

void L1Core::make_newest(std::uint32_t index) {
    order_.to_newest(index);
    const Object& object = objects_[index];
    if (!object.temporary) slots_.set_resident(object.first_unit, object.units, object.last_use_low);
}

void L1Core::count_eviction(std::uint32_t index) {
    prefetch_eviction(index);
    order_.evicted(index, hash_object(objects_[index]));
    const std::uint32_t salt = namespaces_.salt_of(objects_[index].name_space);
    const bool over_quota = order_.has_limits() && namespaces_.units_of_salt(salt) > order_.limit_of(salt);
    note_fate(index, over_quota ? Fate::kOverQuota : Fate::kEvicted);
    if (objects_[index].sampled) ages_.evicted(index);
    ++evicted_objects_;
    evicted_units_ += objects_[index].units;
}

std::uint32_t L1Core::evict_one(std::uint32_t index) {
    const std::uint32_t units = objects_[index].units;
    count_eviction(index);
    erase(index);
    return units;
}

template <typename Next>
Removed L1Core::evict_while(std::uint64_t target_bytes, Next&& next) {
    Removed removed;
    while (removed.size_bytes < target_bytes) {
        const std::uint32_t victim = next();
        if (victim == kNoObject) break;
        removed.size_bytes += bytes(evict_one(victim));
        if (++removed.objects % kObjectsAtOnce == 0) mutex_.yield_to_waiters();
    }
    return removed;
}

Removed L1Core::evict(std::uint64_t target_bytes) {
    const MutexLock lock(mutex_);
    return evict_while(target_bytes, [this] {
        mutex_.assert_held();
        return order_.victim();
    });
}

void L1Core::set_limit(std::string_view salt, std::uint64_t limit_bytes) {
    const MutexLock lock(mutex_);
    limit_salt(order_, namespaces_, salt, limit_bytes / options_.align_bytes);
}

Removed L1Core::enforce_limits(bool spare_new) {
    const MutexLock lock(mutex_);
    const std::uint8_t cycle = cycle_;
    if (spare_new) ++cycle_;
    Removed removed;
    for (const std::uint32_t salt : order_.salts_above_limits()) {  // others may get a number meanwhile: no matter
        const Removed of_salt = evict_while(std::numeric_limits<std::uint64_t>::max(), [&] {
            mutex_.assert_held();
            const std::uint32_t victim = order_.victim_above_limit(salt);
            return victim != kNoObject && spare_new && objects_[victim].cycle == cycle ? kNoObject : victim;
        });
        removed.objects += of_salt.objects;
        removed.size_bytes += of_salt.size_bytes;
        if (of_salt.objects < kObjectsAtOnce) mutex_.yield_to_waiters();
    }
    return removed;
}

std::vector<Overuse> L1Core::take_overuses() {
    const MutexLock lock(mutex_);
    return std::exchange(overuses_, {});
}

Removed L1Core::clear(Owner spared_owner) {
    const MutexLock lock(mutex_);
    std::unordered_set<std::uint32_t> spared;
    if (spared_owner != 0) {
        for (const std::uint64_t id : leases_.of_owner(spared_owner)) {
            const std::vector<std::uint32_t>& objects = leases_.find(id)->objects;
            spared.insert(objects.begin(), objects.end());
        }
    }
    Removed removed;
    for (std::uint32_t index = 0; index < objects_.size(); ++index) {
        if (index % kObjectsAtOnce == kObjectsAtOnce - 1) mutex_.yield_to_waiters();
        Object& object = objects_[index];
        if (object.state != ObjectState::kResident || spared.contains(index)) continue;
        note_fate(index, Fate::kCleared);
        if (object.readers != 0) {
            note_change(index, false);
            keys_.erase(hash_object(object), index);
            order_.leave(index);
            --resident_;
            object.state = ObjectState::kDetached;
            slots_.clear(object.first_unit);
            continue;
        }
        removed.size_bytes += bytes(object.units);
        ++removed.objects;
        erase(index);
    }
    return removed;
}

}  // namespace lmcache
