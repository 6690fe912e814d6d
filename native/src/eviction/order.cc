#include "lmcache/eviction/order.h"

#include "lmcache/eviction/expect.h"

namespace lmcache {

void EvictionOrder::enter(std::uint32_t index, std::uint64_t key_hash) {
    Object& object = objects_[index];
    object.linked = false;
    queues_.stamp(object);
    policy_->admit(object, key_hash);
    enter_again(index);
}

void EvictionOrder::enter_oldest(std::uint32_t index) {
    objects_[index].in_main = false;
    enter_again(index);
    queues_.link_oldest(queue_of(objects_[index]), index);
}

void EvictionOrder::enter_again(std::uint32_t index) {
    const Object& object = objects_[index];
    queues_.add(queue_of(object), object);
    if (object.readers == 0) end_reading(index);
}

void EvictionOrder::leave(std::uint32_t index) {
    unlink(index);
    const Object& object = objects_[index];
    queues_.subtract(queue_of(object), object);
    if (object.readers == 0) begin_reading(index);
}

void EvictionOrder::begin_reading(std::uint32_t index) {
    const Object& object = objects_[index];
    const std::size_t number = number_of(object);
    queues_.subtract_evictable(queues_[number], object);
    if (limits_) limits_->weigh(number);
}

void EvictionOrder::end_reading(std::uint32_t index) {
    const Object& object = objects_[index];
    const std::size_t number = number_of(object);
    queues_.add_evictable(queues_[number], object);
    if (limits_) limits_->weigh(number);
}

void EvictionOrder::use(std::uint32_t index) {
    unlink(index);
    policy_->use(objects_[index]);
}

void EvictionOrder::unlink(std::uint32_t index) {
    if (objects_[index].linked) queues_.unlink(queue_of(objects_[index]), index);
}

void EvictionOrder::to_newest(std::uint32_t index) {
    EvictionQueues::Queue& queue = queue_of(objects_[index]);
    if (objects_[index].linked) queues_.unlink(queue, index);
    queues_.link_newest(queue, index);
}

void EvictionOrder::put_back(std::uint32_t index) {
    if (!objects_[index].linked) queues_.link_by_use(queue_of(objects_[index]), index);
}

void EvictionOrder::check() const {
    std::vector<EvictionQueues::Queue> expected(queues_.size());
    std::size_t residents = 0, linked = 0;
    std::uint64_t evictable = 0;
    for (std::uint32_t index = 0; index < objects_.size(); ++index) {
        const Object& object = objects_[index];
        if (object.state != ObjectState::kResident) continue;
        const std::size_t number = number_of(object);
        expect(number < queues_.size(), "every resident has a queue");
        expect(object.linked || object.readers != 0, "every resident that nobody reads is linked");
        ++residents;
        linked += object.linked;
        expected[number].units += object.charge();
        if (object.readers == 0) expected[number].evictable_units += object.charge();
        if (object.readers == 0) evictable += object.charge();
    }
    expect(residents == queues_.residents(), "the eviction order counts every resident");
    expect(evictable == queues_.evictable_units(), "evictable memory");
    std::size_t walked = 0;
    for (std::size_t number = 0; number < queues_.size(); ++number) {
        const EvictionQueues::Queue& queue = queues_[number];
        expect(queue.units == expected[number].units && queue.evictable_units == expected[number].evictable_units,
               "memory of a queue");
        std::uint32_t newer = kNoObject;
        for (std::uint32_t index = queue.newest; index != kNoObject; index = objects_[index].older) {
            const Object& object = objects_[index];
            expect(object.state == ObjectState::kResident && object.linked, "queues hold residents only");
            expect(number_of(object) == number, "an object is in its own queue");
            expect(object.newer == newer, "links of a queue");
            expect(newer == kNoObject || !is_older(newer, index), "a queue is in the order of last use");
            expect(++walked <= linked, "an object is in a queue once");
            newer = index;
        }
        expect(queue.oldest == newer, "end of a queue");
    }
    expect(walked == linked, "every linked object is in a queue");
    policy_->check();
}

void limit_salt(EvictionOrder& order, Namespaces& namespaces, std::string_view salt, std::uint64_t units) {
    if (!order.has_limits()) return;
    const std::uint32_t number = namespaces.refer_salt(salt);
    const std::uint64_t previous = order.set_limit(number, units);
    // A limit refers to its salt.
    if (units != 0) namespaces.refer_salt(number);
    if (previous != 0) namespaces.release_salt(number);
    namespaces.release_salt(number);
}

}  // namespace lmcache
