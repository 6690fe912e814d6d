// Objects that may be evicted, in order of last use, linked through their records. Leased objects are not in it, so the
// next victim is always the oldest of the list. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lmcache/object_pool.h"

namespace lmcache {

class LruList {
public:
    explicit LruList(ObjectPool& objects) : objects_(objects) {}

    // A use of what is not in the list.
    void stamp(std::uint32_t index) { objects_[index].last_use = ++uses_; }

    void push_newest(std::uint32_t index) {
        Object& object = objects_[index];
        object.last_use = ++uses_;
        object.newer = kNoObject;
        object.older = newest_;
        if (newest_ != kNoObject) {
            objects_[newest_].newer = index;
        } else {
            oldest_ = index;
        }
        newest_ = index;
        ++size_;
        units_ += object.units;
    }

    void unlink(std::uint32_t index) {
        Object& object = objects_[index];
        (object.newer != kNoObject ? objects_[object.newer].older : newest_) = object.older;
        (object.older != kNoObject ? objects_[object.older].newer : oldest_) = object.newer;
        object.newer = kNoObject;
        object.older = kNoObject;
        --size_;
        units_ -= object.units;
    }

    // Whether `a` was used before `b`. Both are in the list, so that the order holds beyond the wrap of the counter.
    bool is_older(std::uint32_t a, std::uint32_t b) const {
        return static_cast<std::int32_t>(objects_[a].last_use - objects_[b].last_use) < 0;
    }

    std::uint32_t oldest() const { return oldest_; }
    std::uint32_t newest() const { return newest_; }
    std::size_t size() const { return size_; }
    std::uint64_t units() const { return units_; }

private:
    ObjectPool& objects_;
    std::uint32_t newest_ = kNoObject;
    std::uint32_t oldest_ = kNoObject;
    std::uint32_t uses_ = 0;
    std::size_t size_ = 0;
    std::uint64_t units_ = 0;  // memory that eviction could free
};

}  // namespace lmcache
