#include "lmcache/eviction_order.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace lmcache {

std::size_t EvictionOrder::queue_number(const Object& object) const {
    switch (policy_) {
        case EvictionPolicy::kIsolatedLru:
            return namespaces_.salt_of(object.name_space);
        case EvictionPolicy::kS3Fifo:
            return object.in_main ? kMain : kSmall;
        default:
            return 0;
    }
}

EvictionOrder::Queue& EvictionOrder::queue_at(std::size_t number) {
    if (number >= queues_.size()) queues_.resize(number + 1);
    return queues_[number];
}

// ---- links ----------------------------------------------------------------------------------------------------------

void EvictionOrder::link_newest(std::uint32_t index) {
    Object& object = objects_[index];
    Queue& queue = queue_of(object);
    object.last_use = ++uses_;
    object.newer = kNoObject;
    object.older = queue.newest;
    (queue.newest != kNoObject ? objects_[queue.newest].newer : queue.oldest) = index;
    queue.newest = index;
    object.linked = true;
}

void EvictionOrder::unlink(std::uint32_t index) {
    Object& object = objects_[index];
    Queue& queue = queue_of(object);
    (object.newer != kNoObject ? objects_[object.newer].older : queue.newest) = object.older;
    (object.older != kNoObject ? objects_[object.older].newer : queue.oldest) = object.newer;
    object.newer = kNoObject;
    object.older = kNoObject;
    object.linked = false;
}

void EvictionOrder::set_aside(std::uint32_t index) {
    if (objects_[index].linked) unlink(index);
}

void EvictionOrder::to_newest(std::uint32_t index) {
    set_aside(index);
    link_newest(index);
}

void EvictionOrder::put_back(std::uint32_t index) {
    Object& object = objects_[index];
    if (object.linked) return;
    // It was set aside when it was the oldest of its queue. What is older now was set aside with it.
    Queue& queue = queue_of(object);
    std::uint32_t newer = queue.oldest;
    while (newer != kNoObject && is_older(newer, index)) newer = objects_[newer].newer;
    object.newer = newer;
    object.older = newer != kNoObject ? objects_[newer].older : queue.newest;
    (newer != kNoObject ? objects_[newer].older : queue.newest) = index;
    (object.older != kNoObject ? objects_[object.older].newer : queue.oldest) = index;
    object.linked = true;
}

// ---- the life of an object ------------------------------------------------------------------------------------------

void EvictionOrder::enter(std::uint32_t index, std::uint64_t key_hash) {
    Object& object = objects_[index];
    object.linked = false;
    object.in_main = false;
    object.last_use = ++uses_;
    if (policy_ == EvictionPolicy::kS3Fifo) {
        if (const auto was_in_main = ghosts_.take(key_hash)) {
            object.in_main = true;
            learn(*was_in_main, object.units);
        }
    }
    Queue& queue = queue_of(object);
    queue.units += object.units;
    ++residents_;
    if (object.readers == 0) end_reading(index);
}

void EvictionOrder::leave(std::uint32_t index) {
    set_aside(index);
    const Object& object = objects_[index];
    queue_of(objects_[index]).units -= object.units;
    --residents_;
    if (object.readers == 0) begin_reading(index);
}

void EvictionOrder::evicted(std::uint32_t index, std::uint64_t key_hash) {
    if (policy_ != EvictionPolicy::kS3Fifo) return;
    ghosts_.remember(residents_);
    ghosts_.add(key_hash, objects_[index].in_main);
}

void EvictionOrder::begin_reading(std::uint32_t index) {
    const Object& object = objects_[index];
    queue_of(object).evictable_units -= object.units;
    evictable_units_ -= object.units;
    if (has_limits()) weigh(queue_number(object));
}

void EvictionOrder::end_reading(std::uint32_t index) {
    const Object& object = objects_[index];
    queue_of(object).evictable_units += object.units;
    evictable_units_ += object.units;
    if (has_limits()) weigh(queue_number(object));
}

void EvictionOrder::use(std::uint32_t index) {
    Object& object = objects_[index];
    set_aside(index);
    if (policy_ != EvictionPolicy::kS3Fifo || object.in_main) return;
    const std::uint64_t evictable = object.readers == 0 ? object.units : 0;
    queues_[kSmall].units -= object.units;
    queues_[kSmall].evictable_units -= evictable;
    object.in_main = true;
    queues_[kMain].units += object.units;
    queues_[kMain].evictable_units += evictable;
}

// ---- decisions ------------------------------------------------------------------------------------------------------

std::uint32_t EvictionOrder::oldest_evictable(Queue& queue) {
    while (queue.oldest != kNoObject && objects_[queue.oldest].readers != 0) unlink(queue.oldest);
    return queue.oldest;
}

std::uint32_t EvictionOrder::victim() {
    switch (policy_) {
        case EvictionPolicy::kNoop:
            return kNoObject;
        case EvictionPolicy::kLru:
            return oldest_evictable(queues_[0]);
        case EvictionPolicy::kIsolatedLru:
            return fullest_.empty() ? kNoObject : oldest_evictable(queues_[fullest_.top()]);
        case EvictionPolicy::kS3Fifo:
            return s3_victim();
    }
    return kNoObject;
}

// What main gives is older than everything in small: with a large share of small this is LRU.
std::uint32_t EvictionOrder::s3_victim() {
    const std::uint32_t in_small = oldest_evictable(queues_[kSmall]);
    const std::uint32_t in_main = oldest_evictable(queues_[kMain]);
    if (in_small == kNoObject) return in_main;
    if (in_main == kNoObject) return in_small;
    const bool small_gives = queues_[kSmall].units > small_share_units_ || is_older(in_small, in_main);
    return small_gives ? in_small : in_main;
}

// A ghost that came back should have been kept: the queue that it went from gets more room.
void EvictionOrder::learn(bool was_in_main, std::uint32_t units) {
    if (was_in_main) {
        small_share_units_ -= std::min<std::uint64_t>(small_share_units_, units);
    } else {
        small_share_units_ = std::min(room_units_, small_share_units_ + units);
    }
}

void EvictionOrder::set_room(std::uint64_t units) {
    constexpr double kFirstShare = 0.1;  // as published
    const double share =
        room_units_ == 0 ? kFirstShare : static_cast<double>(small_share_units_) / static_cast<double>(room_units_);
    small_share_units_ = static_cast<std::uint64_t>(share * static_cast<double>(units));
    room_units_ = units;
}

std::uint32_t EvictionOrder::victim_for(std::uint32_t name_space, std::uint32_t units) {
    if (!would_exceed(name_space, units)) return victim();
    const std::uint32_t salt = namespaces_.salt_of(name_space);
    Queue& own = queue_at(salt);
    const bool others_exceed = !fullest_.empty() && queues_[fullest_.top()].excess_units != 0;
    if (own.evictable_units != 0 && !(others_exceed && fullness(salt, units) < fullness(fullest_.top())))
        return oldest_evictable(own);
    return others_exceed ? oldest_evictable(queues_[fullest_.top()]) : kNoObject;
}

std::uint64_t EvictionOrder::evictable_units_for(std::uint32_t name_space, std::uint32_t units) const {
    if (!would_exceed(name_space, units)) return evictable_units_;
    const std::uint32_t salt = namespaces_.salt_of(name_space);
    if (salt >= queues_.size()) return evictable_excess_units_;
    return evictable_excess_units_ - queues_[salt].evictable_excess_units + queues_[salt].evictable_units;
}

std::vector<std::uint32_t> EvictionOrder::salts_above_limits() const {
    constexpr Fullness kAllTaken{1.0, std::numeric_limits<std::uint64_t>::max()};
    return fullest_.fuller_than(kAllTaken);
}

std::uint32_t EvictionOrder::victim_above_limit(std::uint32_t salt) {
    return queues_[salt].excess_units == 0 ? kNoObject : oldest_evictable(queues_[salt]);
}

bool EvictionOrder::may_go_together(std::uint32_t a, std::uint32_t b) const {
    return !has_limits() || namespaces_.salt_of(objects_[a].name_space) == namespaces_.salt_of(objects_[b].name_space);
}

// ---- limits ---------------------------------------------------------------------------------------------------------

std::uint64_t EvictionOrder::set_limit(std::uint32_t salt, std::uint64_t units) {
    const std::uint64_t former = std::exchange(queue_at(salt).limit_units, units);
    weigh(salt);
    return former;
}

bool EvictionOrder::would_exceed(std::uint32_t name_space, std::uint32_t units) const {
    if (!has_limits()) return false;
    const std::uint32_t salt = namespaces_.salt_of(name_space);
    return namespaces_.units_of_salt(salt) + units > limit_of(salt);
}

Fullness EvictionOrder::fullness(std::size_t salt, std::uint64_t more_units) const {
    const auto number = static_cast<std::uint32_t>(salt);
    return Fullness::of(namespaces_.units_of_salt(number) + more_units, limit_of(number));
}

void EvictionOrder::weigh(std::size_t salt) {
    const auto number = static_cast<std::uint32_t>(salt);
    Queue& queue = queue_at(salt);
    const std::uint64_t used = namespaces_.units_of_salt(number);
    const std::uint64_t excess = used > queue.limit_units ? used - queue.limit_units : 0;
    const std::uint64_t evictable_excess = std::min(excess, queue.evictable_units);
    excess_units_ += excess - std::exchange(queue.excess_units, excess);
    evictable_excess_units_ += evictable_excess - std::exchange(queue.evictable_excess_units, evictable_excess);
    if (queue.evictable_units == 0) {
        fullest_.remove(number);
    } else {
        fullest_.put(number, fullness(salt));
    }
}

// ---- figures --------------------------------------------------------------------------------------------------------

std::size_t EvictionOrder::memory_bytes() const {
    return queues_.capacity() * sizeof(Queue) + fullest_.memory_bytes() + ghosts_.memory_bytes();
}

void EvictionOrder::check() const {
    const auto expect = [](bool holds, const char* invariant) {
        if (!holds) throw std::runtime_error(std::string("L1 invariant broken: ") + invariant);
    };
    std::vector<std::uint64_t> units(queues_.size());
    std::vector<std::uint64_t> evictable(queues_.size());
    std::size_t residents = 0, linked = 0;
    std::uint64_t all_evictable = 0;
    for (std::uint32_t index = 0; index < objects_.size(); ++index) {
        const Object& object = objects_[index];
        if (object.state != ObjectState::kResident) continue;
        const std::size_t number = queue_number(object);
        expect(number < queues_.size(), "every resident has a queue");
        expect(object.linked || object.readers != 0, "every unleased resident is linked");
        ++residents;
        linked += object.linked;
        units[number] += object.units;
        if (object.readers == 0) evictable[number] += object.units;
        if (object.readers == 0) all_evictable += object.units;
    }
    expect(residents == residents_, "the eviction order counts every resident");
    expect(all_evictable == evictable_units_, "evictable memory");
    std::size_t walked = 0;
    for (std::size_t number = 0; number < queues_.size(); ++number) {
        const Queue& queue = queues_[number];
        expect(queue.units == units[number] && queue.evictable_units == evictable[number], "memory of a queue");
        std::uint32_t newer = kNoObject;
        for (std::uint32_t index = queue.newest; index != kNoObject; index = objects_[index].older) {
            const Object& object = objects_[index];
            expect(object.state == ObjectState::kResident && object.linked, "queues hold residents only");
            expect(queue_number(object) == number, "an object is in its own queue");
            expect(object.newer == newer, "links of a queue");
            expect(newer == kNoObject || is_older(index, newer), "a queue is in the order of last use");
            expect(++walked <= linked, "an object is in a queue once");
            newer = index;
        }
        expect(queue.oldest == newer, "end of a queue");
    }
    expect(walked == linked, "every linked object is in a queue");
    if (!has_limits()) return;
    std::uint64_t excess = 0, evictable_excess = 0;
    for (std::uint32_t salt = 0; salt < queues_.size(); ++salt) {
        const std::uint64_t used = salt < namespaces_.salts_end() ? namespaces_.units_of_salt(salt) : 0;
        const std::uint64_t beyond = used - std::min(used, queues_[salt].limit_units);
        excess += beyond;
        evictable_excess += std::min(beyond, queues_[salt].evictable_units);
        expect(fullest_.contains(salt) == (queues_[salt].evictable_units != 0),
               "salts with victims are in their order");
        expect(!fullest_.contains(salt) || !(fullness(fullest_.top()) < fullness(salt)), "the fullest salt is first");
    }
    expect(excess == excess_units_ && evictable_excess == evictable_excess_units_, "memory beyond limits");
}

}  // namespace lmcache
