#include "lmcache/eviction/s3fifo.h"

#include <algorithm>

namespace lmcache {

void S3Fifo::admit(Object& object, std::uint64_t key_hash) {
    const auto was_in_main = ghosts_.take(key_hash);
    object.in_main = was_in_main.has_value();
    if (was_in_main) learn(*was_in_main, object.charge());
}

void S3Fifo::use(Object& object) {
    if (object.in_main) return;
    const bool is_evictable = object.readers == 0;
    EvictionQueues::Queue& small = queues_[kSmall];
    EvictionQueues::Queue& main = queues_[kMain];
    if (is_evictable) queues_.subtract_evictable(small, object);
    queues_.subtract(small, object);
    object.in_main = true;
    queues_.add(main, object);
    if (is_evictable) queues_.add_evictable(main, object);
}

void S3Fifo::evicted(const Object& object, std::uint64_t key_hash) {
    ghosts_.remember(queues_.residents());
    ghosts_.add(key_hash, object.in_main);
}

// What main gives is older than everything in small: with a large share of small this is LRU.
std::uint32_t S3Fifo::victim() {
    const std::uint32_t in_small = queues_.oldest_evictable(queues_[kSmall]);
    const std::uint32_t in_main = queues_.oldest_evictable(queues_[kMain]);
    if (in_small == kNoObject) return in_main;
    if (in_main == kNoObject) return in_small;
    const bool small_gives = queues_[kSmall].units > small_share_units_ || queues_.is_older(in_small, in_main);
    return small_gives ? in_small : in_main;
}

// A ghost that came back should have been kept: the queue that it went from gets more room.
void S3Fifo::learn(bool was_in_main, std::uint64_t units) {
    if (was_in_main) {
        small_share_units_ -= std::min(small_share_units_, units);
    } else {
        small_share_units_ = std::min(room_units_, small_share_units_ + units);
    }
}

void S3Fifo::set_room(std::uint64_t units) {
    constexpr double kFirstShare = 0.1;  // as published
    const double share =
        room_units_ == 0 ? kFirstShare : static_cast<double>(small_share_units_) / static_cast<double>(room_units_);
    small_share_units_ = static_cast<std::uint64_t>(share * static_cast<double>(units));
    room_units_ = units;
}

}  // namespace lmcache
