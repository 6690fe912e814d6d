// The resident objects in queues, each in the order of last use: an intrusive list over the objects' records, with the
// memory that each queue holds. Which queue an object is in and which one gives next is a policy's decision.
//
// Invariant: every resident object that nobody reads is linked in its queue. One that is being read may be linked as
// well; whoever looks for a victim passes it over and unlinks it. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lmcache/object_pool.h"

namespace lmcache {

class EvictionQueues {
public:
    struct Queue {
        std::uint32_t newest = kNoObject;
        std::uint32_t oldest = kNoObject;
        std::uint64_t units = 0;            // of all its objects, linked or not
        std::uint64_t evictable_units = 0;  // of those that nobody reads
    };

    EvictionQueues(ObjectPool& objects, std::size_t count) : objects_(objects), queues_(count) {}

    std::size_t size() const { return queues_.size(); }
    // A queue that is not there yet is made.
    Queue& operator[](std::size_t number) {
        if (number >= queues_.size()) queues_.resize(number + 1);
        return queues_[number];
    }
    const Queue& operator[](std::size_t number) const { return queues_[number]; }

    // ---- the memory of a queue --------------------------------------------------------------------------------------
    void add(Queue& queue, const Object& object);
    void subtract(Queue& queue, const Object& object);
    void add_evictable(Queue& queue, const Object& object);
    void subtract_evictable(Queue& queue, const Object& object);
    std::size_t residents() const { return residents_; }
    std::uint64_t evictable_units() const { return evictable_units_; }

    // ---- links ------------------------------------------------------------------------------------------------------
    // Stamps the object as used now.
    void stamp(Object& object) { object.set_last_use(++newest_use_); }
    // At either end, with a use after or before all others.
    void link_newest(Queue& queue, std::uint32_t index);
    void link_oldest(Queue& queue, std::uint32_t index);
    // Where its last use puts it. Cheap near the old end, where objects that were unlinked come from; far from there
    // it is linked too early, with a last use that fits.
    void link_by_use(Queue& queue, std::uint32_t index);
    void unlink(Queue& queue, std::uint32_t index);

    // The first that nobody reads, or kNoObject.
    std::uint32_t oldest_evictable(Queue& queue);
    bool is_older(std::uint32_t a, std::uint32_t b) const { return objects_[a].last_use() < objects_[b].last_use(); }

    std::size_t memory_bytes() const { return queues_.capacity() * sizeof(Queue); }

private:
    void link_before(Queue& queue, std::uint32_t index, std::uint32_t newer);

    // Uses count up from here, and down for what is reported as older than everything: 2^47 each way.
    static constexpr std::uint64_t kFirstUse = std::uint64_t{1} << 47;

    ObjectPool& objects_;
    std::vector<Queue> queues_;
    std::uint64_t newest_use_ = kFirstUse;
    std::uint64_t oldest_use_ = kFirstUse;
    std::uint64_t evictable_units_ = 0;
    std::size_t residents_ = 0;
};

}  // namespace lmcache
