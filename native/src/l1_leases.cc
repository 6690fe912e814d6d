// Reading: what is resident, and the leases that keep it so.
#include <algorithm>
#include <stdexcept>

#include "l1_sweep.h"
#include "lmcache/l1_core.h"

namespace lmcache {

std::size_t L1Core::probe(NamespaceDigests namespaces, Hashes hashes) {
    const MutexLock lock(mutex_);
    check_product(namespaces, hashes);
    const std::vector<std::uint32_t> numbers = numbers_of(namespaces);
    std::size_t chunks = hashes.size() / kChunkHashBytes;
    sweep(numbers, hashes,
          [&](std::size_t chunk, std::size_t position, std::uint64_t key_hash, const std::uint8_t* hash) {
              const std::uint32_t index = find(key_hash, numbers[position], hash);
              if (index != kNoObject && objects_[index].state == ObjectState::kResident) return true;
              chunks = chunk;
              return false;
          });
    return chunks;
}

std::vector<std::uint32_t> L1Core::resident_prefix(NamespaceDigests namespaces, Hashes hashes, Tails tails) const {
    const std::vector<std::uint32_t> numbers = numbers_of(namespaces);
    std::vector<std::uint32_t> indexes;
    indexes.reserve(namespaces.size() * (hashes.size() / kChunkHashBytes));
    sweep(numbers, hashes, [&](std::size_t, std::size_t position, std::uint64_t key_hash, const std::uint8_t* hash) {
        std::uint32_t index = find(key_hash, numbers[position], hash);
        if (index != kNoObject && objects_[index].state != ObjectState::kResident) index = kNoObject;
        if (index == kNoObject && (tails.empty() || tails[position] == 0)) return false;
        indexes.push_back(index);
        return true;
    });
    indexes.resize(indexes.size() - indexes.size() % namespaces.size());  // a chunk counts when every namespace has it
    return indexes;
}

void L1Core::keep_tails(std::vector<std::uint32_t>& indexes, Tails tails) {
    const std::size_t width = tails.size();
    const std::size_t chunks = usable_prefix(
        indexes.size() / width, tails,
        [&](std::size_t chunk, std::size_t position) { return indexes[chunk * width + position] != kNoObject; });
    indexes.resize(chunks * width);
    for (std::size_t position = 0; position < width; ++position) {
        if (tails[position] == 0) continue;
        for (std::size_t chunk = 0; chunk + tails[position] < chunks; ++chunk) {
            indexes[chunk * width + position] = kNoObject;
        }
    }
}

std::size_t L1Core::touch(NamespaceDigests namespaces, Hashes hashes, Tails tails) {
    const MutexLock lock(mutex_);
    check_product(namespaces, hashes);
    check_tails(namespaces, tails);
    const std::vector<std::uint32_t> indexes = resident_prefix(namespaces, hashes, tails);
    // By namespace: whether the chunk behind is kept longer. Its prefix is then, too, or it would be kept in vain.
    std::vector<bool> suffix_in_main(namespaces.size());
    for (std::size_t i = indexes.size(); i-- > 0;) {
        if (indexes[i] == kNoObject) continue;
        const std::size_t position = i % namespaces.size();
        if (suffix_in_main[position]) order_.use(indexes[i]);
        suffix_in_main[position] = objects_[indexes[i]].in_main;
        make_newest(indexes[i]);
    }
    return indexes.size() / namespaces.size();
}

Acquired L1Core::acquire(Owner owner, NamespaceDigests namespaces, Hashes hashes, double deadline, Reading reading,
                         Tails tails) {
    const MutexLock lock(mutex_);
    check_product(namespaces, hashes);
    check_tails(namespaces, tails);
    std::vector<std::uint32_t> indexes = resident_prefix(namespaces, hashes, tails);
    if (!tails.empty()) keep_tails(indexes, tails);
    Acquired acquired;
    if (indexes.empty()) return acquired;
    const std::size_t width = namespaces.size();
    acquired.chunks = indexes.size() / width;
    acquired.slots.assign(indexes.size(), kNoSlot);
    Lease lease;
    lease.owner = owner;
    lease.deadline = deadline;
    lease.chunks = acquired.chunks;
    lease.reading = reading;
    lease.objects.resize(indexes.size());
    for (std::size_t i = 0; i < indexes.size(); ++i) {
        const std::size_t place = i % width * acquired.chunks + i / width;
        lease.objects[place] = indexes[i];
        if (indexes[i] == kNoObject) continue;
        acquired.slots[place] = offset_of(objects_[indexes[i]]);
        hold(indexes[i], reading);
    }
    acquired.lease = leases_.add(std::move(lease));
    return acquired;
}

Acquired L1Core::acquire_each(Owner owner, NamespaceDigests namespaces, Hashes hashes, double deadline) {
    const MutexLock lock(mutex_);
    Acquired acquired;
    acquired.slots.assign(namespaces.size(), kNoSlot);
    Lease lease;
    lease.owner = owner;
    lease.deadline = deadline;
    lease.chunks = namespaces.size();
    lease.reading = Reading::kCopy;
    lease.objects.assign(namespaces.size(), kNoObject);
    for_each_resident(namespaces, hashes, [&](std::size_t pair, std::uint32_t index) {
        lease.objects[pair] = index;
        acquired.slots[pair] = offset_of(objects_[index]);
        hold(index, lease.reading);
        ++acquired.chunks;
    });
    if (acquired.chunks != 0) acquired.lease = leases_.add(std::move(lease));
    return acquired;
}

std::vector<std::uint8_t> L1Core::resident_each(NamespaceDigests namespaces, Hashes hashes) {
    const MutexLock lock(mutex_);
    std::vector<std::uint8_t> resident(namespaces.size(), 0);
    for_each_resident(namespaces, hashes, [&](std::size_t pair, std::uint32_t) { resident[pair] = 1; });
    return resident;
}

std::vector<std::uint8_t> L1Core::resident_in_all(NamespaceDigests namespaces, Hashes hashes) {
    const MutexLock lock(mutex_);
    check_product(namespaces, hashes);
    const std::vector<std::uint32_t> numbers = numbers_of(namespaces);
    std::vector<std::uint8_t> resident(hashes.size() / kChunkHashBytes, 1);
    sweep(numbers, hashes,
          [&](std::size_t chunk, std::size_t position, std::uint64_t key_hash, const std::uint8_t* hash) {
              const std::uint32_t index = find(key_hash, numbers[position], hash);
              if (index == kNoObject || objects_[index].state != ObjectState::kResident) resident[chunk] = 0;
              return true;
          });
    return resident;
}

std::size_t L1Core::retain(NamespaceDigests namespaces, Hashes hashes) {
    const MutexLock lock(mutex_);
    std::size_t retained = 0;
    for_each_resident(namespaces, hashes, [&](std::size_t, std::uint32_t index) {
        Object& object = objects_[index];
        ++retained;
        if (!object.temporary) return;
        object.temporary = false;
        slots_.set_resident(object.first_unit, object.units, object.last_use_low);
    });
    return retained;
}

bool L1Core::release(std::uint64_t lease) {
    const MutexLock lock(mutex_);
    if (leases_.find(lease) == nullptr) return false;
    end_lease(lease);
    return true;
}

std::size_t L1Core::renew(Owner owner, double deadline) {
    const MutexLock lock(mutex_);
    std::size_t renewed = 0;
    for (const std::uint64_t id : leases_.of_owner(owner)) {
        leases_.find(id)->deadline = deadline;
        ++renewed;
    }
    for (const std::uint64_t id : reservations_.of_owner(owner)) {
        Reservation& reservation = *reservations_.find(id);
        if (reservation.quarantined) continue;
        reservation.deadline = deadline;
        ++renewed;
    }
    leases_.deadline_moved(deadline);
    reservations_.deadline_moved(deadline);
    return renewed;
}

EndedClaims L1Core::expire(double now) {
    const MutexLock lock(mutex_);
    const std::vector<std::uint64_t> leases = leases_.expired(now);
    for (const std::uint64_t id : leases) end_lease(id);
    std::size_t quarantined = 0;
    for (const std::uint64_t id : reservations_.expired(now)) {
        note_abandoned(*reservations_.find(id));
        quarantine(*reservations_.find(id));
        ++quarantined;
    }
    return {leases.size(), quarantined};
}

EndedClaims L1Core::drop_owner(Owner owner) {
    const MutexLock lock(mutex_);
    const std::vector<std::uint64_t> leases = leases_.of_owner(owner);
    for (const std::uint64_t id : leases) end_lease(id);
    const std::vector<std::uint64_t> reservations = reservations_.of_owner(owner);
    for (const std::uint64_t id : reservations) {
        note_abandoned(*reservations_.find(id));
        end_reservation(id);
    }
    return {leases.size(), reservations.size()};
}

void L1Core::hold(std::uint32_t index, Reading reading) {
    if (objects_[index].readers++ == 0) {
        order_.begin_reading(index);
        ++leased_objects_;
    }
    if (reading == Reading::kCopy) return;
    order_.use(index);
    if (objects_[index].sampled) ages_.used(index);
}

void L1Core::let_go(std::uint32_t index, Reading reading) {
    Object& object = objects_[index];
    const bool is_last = --object.readers == 0;
    leased_objects_ -= is_last;
    if (object.state == ObjectState::kDetached) {
        if (is_last) erase(index);
        return;
    }
    if (is_last) order_.end_reading(index);
    if (is_last && object.temporary) {
        erase(index);
    } else if (reading == Reading::kUse) {
        make_newest(index);  // also while others read on: its place must not depend on when they end
    } else if (is_last) {
        order_.put_back(index);
    }
}

void L1Core::end_lease(std::uint64_t id) {
    const Lease lease = leases_.take(id);
    const std::size_t width = lease.objects.size() / lease.chunks;
    // Last chunk first, so that the first ends up as the most recently used and a suffix is evicted before its prefix.
    for (std::size_t chunk = lease.chunks; chunk-- > 0;) {
        for (std::size_t position = 0; position < width; ++position) {
            const std::uint32_t index = lease.objects[position * lease.chunks + chunk];
            if (index != kNoObject) let_go(index, lease.reading);
        }
    }
}

}  // namespace lmcache
