// What is in L1, and whether its structures agree with each other.
#include <algorithm>
#include <stdexcept>
#include <unordered_map>

#include "lmcache/l1_core.h"

namespace lmcache {

ObjectPage L1Core::list_objects(std::uint32_t start, std::size_t count, std::size_t most_examined) {
    const MutexLock lock(mutex_);
    ObjectPage page;
    std::unordered_map<std::uint32_t, std::uint32_t> positions;  // by number
    for (std::uint32_t index = start; index < objects_.size(); ++index) {
        const Object& object = objects_[index];
        if (index - start == most_examined) {
            page.next_start = index;
            break;
        }
        if (object.state != ObjectState::kResident) continue;
        if (page.positions.size() == count) {
            page.next_start = index;
            break;
        }
        const auto [position, is_new] =
            positions.try_emplace(object.name_space, static_cast<std::uint32_t>(page.namespaces.size()));
        if (is_new) page.namespaces.push_back(namespaces_.digest_of(object.name_space));
        page.positions.push_back(position->second);
        page.hashes.insert(page.hashes.end(), object.hash.begin(), object.hash.end());
        page.sizes_bytes.push_back(bytes(object.units));
    }
    return page;
}

std::uint64_t L1Core::watch_changes() {
    const MutexLock lock(mutex_);
    changes_.watch();
    return changes_.next();
}

void L1Core::unwatch_changes() {
    const MutexLock lock(mutex_);
    changes_.unwatch();
}

ChangePage L1Core::changes(std::uint64_t cursor, std::size_t most) {
    return page_of(read_in_steps(cursor, most, [&](std::uint64_t from, std::size_t count) {
        const MutexLock lock(mutex_);
        return changes_.read(from, count);
    }));
}

L1Stats L1Core::stats() {
    const MutexLock lock(mutex_);
    L1Stats stats{};
    stats.capacity_bytes = bytes(arena_.capacity());
    stats.committed_bytes = bytes(arena_.committed());
    stats.used_bytes = bytes(arena_.used_units());
    stats.free_bytes = bytes(arena_.free_units());
    stats.largest_free_bytes = bytes(arena_.largest_free());
    stats.above_limits_bytes = bytes(order_.excess_units());
    stats.objects = resident_;
    stats.staged = staged_;
    stats.leases = leases_.size();
    stats.leased_objects = leased_objects_;
    stats.reservations = reservations_.size();
    stats.quarantined_bytes = bytes(quarantined_units_);
    stats.evicted_objects = evicted_objects_;
    stats.evicted_bytes = bytes(evicted_units_);
    stats.allocation_failures = allocation_failures_;
    stats.index_bytes = objects_.memory_bytes() + keys_.memory_bytes() + arena_.memory_bytes() +
                        namespaces_.memory_bytes() + order_.memory_bytes() + ages_.memory_bytes() +
                        changes_.memory_bytes();
    stats.namespaces = namespaces_.size();
    stats.salts = namespaces_.salts();
    return stats;
}

void L1Core::set_age_sample_rate(double rate) {
    if (!(rate >= 0 && rate <= 1)) throw std::invalid_argument("the sample rate must be from 0 to 1");
    const MutexLock lock(mutex_);
    ages_.set_rate(rate);
}

Ages L1Core::take_ages() {
    const MutexLock lock(mutex_);
    return ages_.take();
}

std::uint64_t L1Core::usage_of(std::string_view salt) {
    const MutexLock lock(mutex_);
    return bytes(namespaces_.usage_of(salt));
}

std::vector<std::pair<std::string, std::uint64_t>> L1Core::salt_usage() {
    const MutexLock lock(mutex_);
    auto usage = namespaces_.usage();
    for (auto& [salt, size] : usage) size = bytes(size);
    return usage;
}

void L1Core::check() {
    const MutexLock lock(mutex_);
    const auto expect = [](bool holds, const char* invariant) {
        if (!holds) throw std::runtime_error(std::string("L1 invariant broken: ") + invariant);
    };
    arena_.check();

    // Readers and writers as the claims see them.
    std::vector<std::uint32_t> readers(objects_.size());
    std::vector<std::uint8_t> written(objects_.size());
    for (const auto& [id, lease] : leases_) {
        for (const std::uint32_t index : lease.objects) {
            if (index != kNoObject) ++readers.at(index);
        }
    }
    for (const auto& [id, reservation] : reservations_) {
        const ObjectState state = reservation.quarantined ? ObjectState::kQuarantined : ObjectState::kStaged;
        for (const std::uint32_t index : reservation.objects) {
            if (index == kNoObject) continue;
            expect(objects_[index].state == state, "a reservation's objects are staged, or quarantined with it");
            expect(++written.at(index) == 1, "an object has one writer");
        }
    }

    std::size_t resident = 0, staged = 0, leased = 0;
    std::uint64_t used = 0, quarantined = 0;
    std::size_t with_memory = 0;
    std::vector<std::uint32_t> references(namespaces_.end());
    for (std::uint32_t index = 0; index < objects_.size(); ++index) {
        const Object& object = objects_[index];
        expect(object.state == ObjectState::kUnused || object.readers == readers[index],
               "readers == leases that name the object");
        if (object.state == ObjectState::kUnused) {
            expect(readers[index] == 0, "no lease names an unused record");
            continue;
        }
        const bool in_table = object.state == ObjectState::kResident || object.state == ObjectState::kStaged;
        const bool being_written = object.state == ObjectState::kStaged || object.state == ObjectState::kQuarantined;
        const std::uint32_t found = find(hash_object(object), object.name_space, object.hash.data());
        expect((found == index) == in_table, "staged and resident objects, and no others, are found by key");
        expect((written[index] == 1) == being_written, "every staged object belongs to a reservation");
        expect(!being_written || object.readers == 0, "what is being written has no readers");
        expect(object.state != ObjectState::kDetached || object.readers != 0, "a detached object has readers");
        resident += object.state == ObjectState::kResident;
        staged += object.state == ObjectState::kStaged;
        leased += object.readers != 0;
        used += object.units;
        if (object.state == ObjectState::kQuarantined) quarantined += object.units;
        ++with_memory;
        ++references.at(object.name_space);
    }
    expect(resident == resident_ && staged == staged_ && leased == leased_objects_, "counts of objects");
    expect(keys_.size() == resident + staged, "the key table holds staged and resident objects");
    expect(used == arena_.used_units(), "used + free == committed");
    expect(used == namespaces_.total_units(), "the salts' memory adds up to what is used");
    expect(quarantined == quarantined_units_, "quarantined memory");
    std::vector<std::uint32_t> salt_references(namespaces_.salts_end());
    std::size_t namespaces = 0;
    for (std::uint32_t id = 0; id < references.size(); ++id) {
        expect(namespaces_.references(id) == references[id], "a namespace is kept by its objects alone");
        if (references[id] == 0) continue;
        ++salt_references.at(namespaces_.salt_of(id));
        ++namespaces;
    }
    expect(namespaces == namespaces_.size(), "namespaces without objects are forgotten");
    for (std::uint32_t salt = 0; salt < salt_references.size(); ++salt) {
        const std::uint32_t kept = salt_references[salt] + (order_.limit_of(salt) != 0 ? 1 : 0);
        expect(namespaces_.salt_references(salt) == kept, "a salt is kept by its namespaces and its limit alone");
    }

    std::size_t extents = 0;
    arena_.for_each([&](const Arena::Extent& extent) {
        mutex_.assert_held();
        if (extent.tenant == Arena::kFree) return;
        const Object& object = objects_[extent.tenant];
        expect(
            object.state != ObjectState::kUnused && object.first_unit == extent.first && object.units == extent.units,
            "the arena and the objects agree on who is where");
        ++extents;
    });
    expect(extents == with_memory, "every object has its own memory");

    order_.check();
}

}  // namespace lmcache
