#include "lmcache/eviction_order.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace lmcache {

namespace {

// Many salts are not looked through for every object.
constexpr std::size_t kSaltsPerGive = 16;
constexpr std::size_t kMostGives = 64;

}  // namespace

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
}

void EvictionOrder::end_reading(std::uint32_t index) {
    const Object& object = objects_[index];
    queue_of(object).evictable_units += object.units;
    evictable_units_ += object.units;
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
            return fullest_salts_victim();
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

std::uint32_t EvictionOrder::victim_of(std::uint32_t name_space) {
    if (!has_limits()) return victim();
    return oldest_evictable(queue_at(namespaces_.salt_of(name_space)));
}

std::uint32_t EvictionOrder::victim_above_limit(std::uint32_t& salt) {
    if (!has_limits()) return kNoObject;
    for (; salt < queues_.size(); ++salt) {
        if (queues_[salt].evictable_units == 0 || namespaces_.units_of_salt(salt) <= queues_[salt].limit_units)
            continue;
        return oldest_evictable(queues_[salt]);
    }
    return kNoObject;
}

std::uint32_t EvictionOrder::fullest_salts_victim() {
    if (fullest_gives_ == 0 || queues_[fullest_].evictable_units == 0) {
        double most = -1;
        for (std::uint32_t salt = 0; salt < queues_.size(); ++salt) {
            const Queue& queue = queues_[salt];
            if (queue.evictable_units == 0) continue;
            const double part = queue.limit_units == 0 ? std::numeric_limits<double>::infinity()
                                                       : static_cast<double>(namespaces_.units_of_salt(salt)) /
                                                             static_cast<double>(queue.limit_units);
            if (part > most) {
                most = part;
                fullest_ = salt;
            }
        }
        if (most < 0) return kNoObject;
        fullest_gives_ = std::clamp<std::size_t>(queues_.size() / kSaltsPerGive, 1, kMostGives);
    }
    --fullest_gives_;
    return oldest_evictable(queues_[fullest_]);
}

bool EvictionOrder::may_go_together(std::uint32_t a, std::uint32_t b) const {
    return !has_limits() || namespaces_.salt_of(objects_[a].name_space) == namespaces_.salt_of(objects_[b].name_space);
}

// ---- limits ---------------------------------------------------------------------------------------------------------

std::uint64_t EvictionOrder::evictable_units_of(std::uint32_t name_space) const {
    const std::size_t number = has_limits() ? namespaces_.salt_of(name_space) : 0;
    return number < queues_.size() ? queues_[number].evictable_units : 0;
}

void EvictionOrder::set_limit(std::uint32_t salt, std::uint64_t units) {
    if (has_limits()) queue_at(salt).limit_units = units;
}

std::uint64_t EvictionOrder::limit_of(std::uint32_t name_space) const {
    const std::size_t number = namespaces_.salt_of(name_space);
    return number < queues_.size() ? queues_[number].limit_units : 0;
}

// ---- figures --------------------------------------------------------------------------------------------------------

std::size_t EvictionOrder::memory_bytes() const { return queues_.capacity() * sizeof(Queue) + ghosts_.memory_bytes(); }

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
}

}  // namespace lmcache
