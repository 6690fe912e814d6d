#include "lmcache/eviction/isolated_lru.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "lmcache/eviction/expect.h"

namespace lmcache {

IsolatedLru::Share& IsolatedLru::share_of(std::size_t salt) {
    if (salt >= shares_.size()) shares_.resize(salt + 1);
    return shares_[salt];
}

std::uint32_t IsolatedLru::victim_for(std::uint32_t name_space, std::uint64_t units) {
    if (!would_exceed(name_space, units)) return victim();
    const std::uint32_t salt = namespaces_.salt_of(name_space);
    const bool others_exceed = !fullest_.empty() && share_of(fullest_.top()).excess_units != 0;
    if (queues_[salt].evictable_units != 0 && !(others_exceed && fullness(salt, units) < fullness(fullest_.top())))
        return oldest_of(salt);
    return others_exceed ? oldest_of(fullest_.top()) : kNoObject;
}

std::uint64_t IsolatedLru::evictable_units_for(std::uint32_t name_space, std::uint64_t units) const {
    if (!would_exceed(name_space, units)) return queues_.evictable_units();
    const std::uint32_t salt = namespaces_.salt_of(name_space);
    if (salt >= shares_.size()) return evictable_excess_units_;
    return evictable_excess_units_ - shares_[salt].evictable_excess_units +
           std::as_const(queues_)[salt].evictable_units;
}

std::vector<std::uint32_t> IsolatedLru::salts_above_limits() const {
    constexpr Fullness kAllTaken{1.0, std::numeric_limits<std::uint64_t>::max()};
    return fullest_.fuller_than(kAllTaken);
}

std::uint32_t IsolatedLru::victim_above_limit(std::uint32_t salt) {
    return share_of(salt).excess_units == 0 ? kNoObject : oldest_of(salt);
}

std::uint64_t IsolatedLru::set_limit(std::uint32_t salt, std::uint64_t units) {
    const std::uint64_t previous = std::exchange(share_of(salt).limit_units, units);
    weigh(salt);
    return previous;
}

bool IsolatedLru::would_exceed(std::uint32_t name_space, std::uint64_t units) const {
    const std::uint32_t salt = namespaces_.salt_of(name_space);
    return namespaces_.units_of_salt(salt) + units > limit_of(salt);
}

Fullness IsolatedLru::fullness(std::uint32_t salt, std::uint64_t more_units) const {
    return Fullness::of(namespaces_.units_of_salt(salt) + more_units, limit_of(salt));
}

void IsolatedLru::weigh(std::size_t salt) {
    const auto number = static_cast<std::uint32_t>(salt);
    const EvictionQueues::Queue& queue = queues_[salt];
    Share& share = share_of(salt);
    const std::uint64_t used = namespaces_.units_of_salt(number);
    const std::uint64_t excess = used > share.limit_units ? used - share.limit_units : 0;
    const std::uint64_t evictable_excess = std::min(excess, queue.evictable_units);
    excess_units_ += excess - std::exchange(share.excess_units, excess);
    evictable_excess_units_ += evictable_excess - std::exchange(share.evictable_excess_units, evictable_excess);
    if (queue.evictable_units == 0) {
        fullest_.remove(number);
    } else {
        fullest_.put(number, fullness(number));
    }
}

void IsolatedLru::check() const {
    const EvictionQueues& queues = queues_;
    std::uint64_t excess = 0, evictable_excess = 0;
    for (std::uint32_t salt = 0; salt < queues.size(); ++salt) {
        const std::uint64_t used = salt < namespaces_.salts_end() ? namespaces_.units_of_salt(salt) : 0;
        const std::uint64_t beyond = used - std::min(used, limit_of(salt));
        excess += beyond;
        evictable_excess += std::min(beyond, queues[salt].evictable_units);
        expect(fullest_.contains(salt) == (queues[salt].evictable_units != 0), "salts with victims are in their order");
        expect(!fullest_.contains(salt) || !(fullness(fullest_.top()) < fullness(salt)), "the fullest salt is first");
    }
    expect(excess == excess_units_ && evictable_excess == evictable_excess_units_, "memory beyond limits");
}

}  // namespace lmcache
