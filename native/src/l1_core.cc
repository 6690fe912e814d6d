// Construction, keys, and how memory is taken and given back.
#include "lmcache/l1_core.h"

#include <bit>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "l1_sweep.h"

namespace lmcache {

namespace {

std::uint32_t capacity_units(const L1Options& options) {
    if (!std::has_single_bit(options.align_bytes)) throw std::invalid_argument("align_bytes must be a power of two");
    if (options.first_offset % options.align_bytes != 0) {
        throw std::invalid_argument("first_offset must be a multiple of align_bytes");
    }
    const std::uint64_t units = options.capacity_bytes / options.align_bytes;
    if (units == 0) throw std::invalid_argument("capacity_bytes must be at least align_bytes");
    if (units >= std::numeric_limits<std::uint32_t>::max()) {
        throw std::invalid_argument("capacity_bytes is more than 2^32 times align_bytes; use a larger alignment");
    }
    return static_cast<std::uint32_t>(units);
}

}  // namespace

L1Core::L1Core(const L1Options& options)
    : options_(options),
      arena_(capacity_units(options)),
      slots_(options.slot_table),
      order_(options.policy, objects_, namespaces_),
      ages_(options.now) {
    fates_.remember(kFatesKept);
    if (options.slot_table % sizeof(std::uint64_t) != 0) {
        throw std::invalid_argument("slot_table must be a multiple of 8");
    }
}

void L1Core::set_committed(std::uint64_t committed_bytes) {
    const std::uint64_t units = committed_bytes / options_.align_bytes;
    const MutexLock lock(mutex_);
    if (units > arena_.capacity()) throw std::invalid_argument("committed_bytes is more than the capacity");
    arena_.set_committed(static_cast<std::uint32_t>(units));
    order_.set_room(arena_.committed());
}

std::uint32_t L1Core::find(std::uint64_t key_hash, std::uint32_t name_space, const std::uint8_t* hash) const {
    return keys_.find(key_hash, [&](std::uint32_t index) {
        const Object& object = objects_[index];
        return object.name_space == name_space && std::memcmp(object.hash.data(), hash, kChunkHashBytes) == 0;
    });
}

void L1Core::check_product(NamespaceDigests namespaces, Hashes hashes) {
    if (namespaces.empty()) throw std::invalid_argument("at least one namespace is needed");
    if (hashes.size() % kChunkHashBytes != 0) throw std::invalid_argument("hashes must be 32 bytes each");
    const std::size_t chunks = hashes.size() / kChunkHashBytes;
    if (chunks > kMaxObjectsPerCall / namespaces.size()) throw std::invalid_argument("too many objects in one call");
}

void L1Core::check_tails(NamespaceDigests namespaces, Tails tails) {
    if (!tails.empty() && tails.size() != namespaces.size())
        throw std::invalid_argument("tails must be empty or hold one number for each namespace");
}

std::vector<std::uint32_t> L1Core::numbers_of(NamespaceDigests namespaces) const {
    std::vector<std::uint32_t> numbers;
    numbers.reserve(namespaces.size());
    for (const Digest& digest : namespaces) numbers.push_back(namespaces_.find(digest));
    return numbers;
}

std::uint64_t L1Core::offset_of(const Object& object) const { return options_.first_offset + bytes(object.first_unit); }

std::uint32_t L1Core::stage(Owner owner, std::uint64_t key_hash, std::uint32_t name_space, const std::uint8_t* hash,
                            std::uint32_t units) {
    const std::uint32_t index = objects_.take();
    const auto first = allocate(units, index, name_space);
    if (!first) {
        objects_.give_back(index);
        return kNoObject;
    }
    Object& object = objects_[index];
    std::memcpy(object.hash.data(), hash, kChunkHashBytes);
    object.name_space = name_space;
    object.first_unit = *first;
    object.units = units;
    object.state = ObjectState::kStaged;
    slots_.set_staged(*first, units, owner_word(owner));
    keys_.insert(key_hash, index);
    charge(name_space, units);
    ++staged_;
    return index;
}

void L1Core::charge(std::uint32_t name_space, std::uint32_t units) {
    namespaces_.refer(name_space);
    namespaces_.add_units(name_space, units);
    order_.usage_changed(namespaces_.salt_of(name_space));
}

void L1Core::discharge(std::uint32_t name_space, std::uint32_t units) {
    namespaces_.subtract_units(name_space, units);
    order_.usage_changed(namespaces_.salt_of(name_space));
    namespaces_.release(name_space);
}

void L1Core::erase(std::uint32_t index) {
    const std::uint32_t first = objects_[index].first_unit;
    forget(index);
    arena_.free(first, index);
}

void L1Core::forget(std::uint32_t index) {
    const Object& object = objects_[index];
    slots_.clear(object.first_unit);
    switch (object.state) {
        case ObjectState::kStaged:
            keys_.erase(hash_object(object), index);
            --staged_;
            break;
        case ObjectState::kResident:
            note_change(index, false);
            keys_.erase(hash_object(object), index);
            order_.leave(index);
            --resident_;
            break;
        case ObjectState::kQuarantined:
            quarantined_units_ -= object.units;
            break;
        case ObjectState::kDetached:
            break;
        case ObjectState::kUnused:
        case ObjectState::kLeaving:  // of ledgers only
            throw std::logic_error("L1Core: object erased twice");
    }
    if (object.sampled) ages_.gone(index);
    discharge(object.name_space, object.units);
    objects_.give_back(index);
}

std::size_t L1Core::remove(NamespaceDigests namespaces, Hashes hashes, Fate fate) {
    const MutexLock lock(mutex_);
    std::size_t removed = 0;
    for_each_resident(namespaces, hashes, [&](std::size_t, std::uint32_t index) {
        if (objects_[index].readers != 0) return;
        if (fate != Fate::kUnknown) note_fate(index, fate);
        erase(index);
        ++removed;
    });
    return removed;
}

}  // namespace lmcache
