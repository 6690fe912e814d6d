// Writing: slots that are reserved, then committed, aborted or quarantined.
#include <limits>
#include <stdexcept>

#include "l1_sweep.h"
#include "lmcache/l1_core.h"
#include "lmcache/rounding.h"

namespace lmcache {

Reserved L1Core::reserve(Owner owner, NamespaceDigests digests, std::string_view salt,
                         std::span<const std::uint64_t> sizes_bytes, Hashes hashes, double deadline,
                         std::span<const std::uint8_t> wanted) {
    if (sizes_bytes.size() != digests.size())
        throw std::invalid_argument("sizes must hold one size for each namespace");
    std::vector<std::uint32_t> units;
    units.reserve(sizes_bytes.size());
    for (const std::uint64_t size_bytes : sizes_bytes) {
        if (size_bytes == 0) throw std::invalid_argument("sizes must be more than 0");
        const std::uint64_t needed = div_ceil(size_bytes, options_.align_bytes);
        units.push_back(
            static_cast<std::uint32_t>(std::min<std::uint64_t>(needed, std::numeric_limits<std::uint32_t>::max())));
    }

    const MutexLock lock(mutex_);
    check_product(digests, hashes);
    const std::size_t chunks = hashes.size() / kChunkHashBytes;
    const std::size_t width = digests.size();
    if (!wanted.empty() && wanted.size() != width * chunks)
        throw std::invalid_argument("wanted must be empty or hold one byte for each namespace and chunk");
    // Evicting the last object of one of them must not end its number during this call.
    const NamespaceReferences references(namespaces_, digests, salt);
    const std::vector<std::uint32_t>& namespaces = references.ids();
    Reserved reserved;
    reserved.slots.assign(width * chunks, kNoSlot);
    Reservation reservation;
    reservation.owner = owner;
    reservation.deadline = deadline;
    reservation.chunks = chunks;
    reservation.objects.assign(width * chunks, kNoObject);
    // What is resident already is held during this call: making room for a chunk must evict neither what comes before
    // it nor the chunk's own other objects.
    std::vector<std::uint32_t> held;
    std::vector<std::pair<std::size_t, std::uint64_t>> absent;  // position and key hash, of the chunk at hand
    std::size_t handed_out = 0;
    std::size_t chunks_with_room = chunks;
    sweep(namespaces, hashes,
          [&](std::size_t chunk, std::size_t position, std::uint64_t key_hash, const std::uint8_t* hash) {
              const std::uint32_t found = find(key_hash, namespaces[position], hash);
              if (found == kNoObject) {
                  if (wanted.empty() || wanted[position * chunks + chunk] != 0) absent.emplace_back(position, key_hash);
              } else if (objects_[found].state == ObjectState::kResident) {
                  hold(found, Reading::kCopy);
                  held.push_back(found);
              }
              if (position + 1 < width) return true;
              for (const auto& [row, row_hash] : absent) {
                  if (find(row_hash, namespaces[row], hash) != kNoObject) continue;  // the same namespace twice
                  const std::uint32_t index = stage(owner, row_hash, namespaces[row], hash, units[row]);
                  if (index == kNoObject) {
                      chunks_with_room = chunk;
                      return false;
                  }
                  reservation.objects[row * chunks + chunk] = index;
                  reserved.slots[row * chunks + chunk] = offset_of(objects_[index]);
                  ++handed_out;
              }
              absent.clear();
              return true;
          });
    if (chunks_with_room < chunks) {
        reserved.chunks_without_room = chunks - chunks_with_room;
        allocation_failures_ += reserved.chunks_without_room;
        const std::uint8_t* const refused = &hashes[chunks_with_room * kChunkHashBytes];
        for (const Digest& digest : digests) {
            fates_.add(fate_key(digest, refused), static_cast<std::uint8_t>(Fate::kNoRoom));
        }
        for (std::size_t position = 0; position < width; ++position) {
            const std::size_t place = position * chunks + chunks_with_room;
            if (reservation.objects[place] == kNoObject) continue;
            erase(reservation.objects[place]);
            reservation.objects[place] = kNoObject;
            reserved.slots[place] = kNoSlot;
            --handed_out;
        }
    }
    for (auto index = held.rbegin(); index != held.rend(); ++index) {
        if (--objects_[*index].readers == 0) {
            order_.end_reading(*index);
            --leased_objects_;
        }
        make_newest(*index);
    }
    if (handed_out != 0) reserved.reservation = reservations_.add(std::move(reservation));
    return reserved;
}

Committed L1Core::commit(std::uint64_t id, std::span<const std::uint8_t> written, const CommitOptions& options) {
    const MutexLock lock(mutex_);
    Committed committed;
    const Reservation* found = reservations_.find(id);
    if (found == nullptr || found->quarantined) return committed;
    if (!written.empty() && written.size() != found->objects.size()) {
        throw std::invalid_argument("written must be empty or hold one byte for each namespace and chunk");
    }
    Reservation reservation = reservations_.take(id);
    const std::size_t chunks = reservation.chunks;
    const std::size_t width = reservation.objects.size() / chunks;
    const bool leased = options.lease_owner != 0;
    for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
        for (std::size_t position = 0; position < width; ++position) {
            std::uint32_t& index = reservation.objects[position * chunks + chunk];
            if (index == kNoObject) continue;
            if (!written.empty() && written[position * chunks + chunk] == 0) {
                erase(index);
                index = kNoObject;
                continue;
            }
            Object& object = objects_[index];
            object.state = ObjectState::kResident;
            object.cycle = cycle_;
            object.temporary = options.temporary;
            --staged_;
            ++resident_;
            note_change(index, true);
            if (leased) {
                object.readers = 1;
                ++leased_objects_;
            }
            const std::uint64_t key_hash = hash_object(object);
            order_.enter(index, key_hash);
            object.sampled = ages_.wants(key_hash);
            if (object.sampled) ages_.stored(index);
            if (object.temporary) {
                slots_.clear(object.first_unit);  // nobody writes there, and nobody is to keep it
            } else {                              // in chunk order: whoever dies in the middle leaves a prefix
                slots_.set_resident(object.first_unit, object.units, object.last_use_low);
            }
            committed.records.push_back({static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(chunk),
                                         offset_of(object), bytes(object.units)});
        }
    }
    if (committed.records.empty()) return committed;
    if (leased) {
        Lease lease;
        lease.owner = options.lease_owner;
        lease.deadline = options.deadline;
        lease.chunks = chunks;
        lease.objects = std::move(reservation.objects);
        committed.lease = leases_.add(std::move(lease));
        return committed;
    }
    for (std::size_t chunk = chunks; chunk-- > 0;) {
        for (std::size_t position = 0; position < width; ++position) {
            const std::uint32_t index = reservation.objects[position * chunks + chunk];
            if (index != kNoObject) make_newest(index);
        }
    }
    return committed;
}

bool L1Core::abort(std::uint64_t reservation) {
    const MutexLock lock(mutex_);
    if (reservations_.find(reservation) == nullptr) return false;
    end_reservation(reservation);
    return true;
}

bool L1Core::quarantine(std::uint64_t id) {
    const MutexLock lock(mutex_);
    Reservation* const reservation = reservations_.find(id);
    if (reservation == nullptr) return false;
    if (!reservation->quarantined) quarantine(*reservation);
    return true;
}

void L1Core::end_reservation(std::uint64_t id) {
    for (const std::uint32_t index : reservations_.take(id).objects) {
        if (index != kNoObject) erase(index);
    }
}

void L1Core::quarantine(Reservation& reservation) {
    reservation.quarantined = true;
    reservation.deadline = std::numeric_limits<double>::infinity();
    for (const std::uint32_t index : reservation.objects) {
        if (index == kNoObject) continue;
        Object& object = objects_[index];
        keys_.erase(hash_object(object), index);
        object.state = ObjectState::kQuarantined;
        --staged_;
        quarantined_units_ += object.units;
    }
}

}  // namespace lmcache
