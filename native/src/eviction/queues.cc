#include "lmcache/eviction/queues.h"

namespace lmcache {

void EvictionQueues::add(Queue& queue, const Object& object) {
    queue.units += object.charge();
    ++residents_;
}

void EvictionQueues::subtract(Queue& queue, const Object& object) {
    queue.units -= object.charge();
    --residents_;
}

void EvictionQueues::add_evictable(Queue& queue, const Object& object) {
    queue.evictable_units += object.charge();
    evictable_units_ += object.charge();
}

void EvictionQueues::subtract_evictable(Queue& queue, const Object& object) {
    queue.evictable_units -= object.charge();
    evictable_units_ -= object.charge();
}

void EvictionQueues::link_newest(Queue& queue, std::uint32_t index) {
    stamp(objects_[index]);
    link_before(queue, index, kNoObject);
}

void EvictionQueues::link_oldest(Queue& queue, std::uint32_t index) {
    objects_[index].set_last_use(--oldest_use_);
    link_before(queue, index, queue.oldest);
}

void EvictionQueues::link_by_use(Queue& queue, std::uint32_t index) {
    // Usually it was unlinked as the oldest of its queue, and what is older now was unlinked with it.
    constexpr int kMostSteps = 1024;
    std::uint32_t newer = queue.oldest;
    for (int step = 0; newer != kNoObject && is_older(newer, index); ++step) {
        if (step == kMostSteps) {
            objects_[index].set_last_use(objects_[newer].last_use());
            break;
        }
        newer = objects_[newer].newer;
    }
    link_before(queue, index, newer);
}

// `newer` is kNoObject for the new end.
void EvictionQueues::link_before(Queue& queue, std::uint32_t index, std::uint32_t newer) {
    Object& object = objects_[index];
    object.newer = newer;
    object.older = newer != kNoObject ? objects_[newer].older : queue.newest;
    (newer != kNoObject ? objects_[newer].older : queue.newest) = index;
    (object.older != kNoObject ? objects_[object.older].newer : queue.oldest) = index;
    object.linked = true;
}

void EvictionQueues::unlink(Queue& queue, std::uint32_t index) {
    Object& object = objects_[index];
    (object.newer != kNoObject ? objects_[object.newer].older : queue.newest) = object.older;
    (object.older != kNoObject ? objects_[object.older].newer : queue.oldest) = object.newer;
    object.newer = kNoObject;
    object.older = kNoObject;
    object.linked = false;
}

std::uint32_t EvictionQueues::oldest_evictable(Queue& queue) {
    while (queue.oldest != kNoObject && objects_[queue.oldest].readers != 0) unlink(queue, queue.oldest);
    return queue.oldest;
}

}  // namespace lmcache
