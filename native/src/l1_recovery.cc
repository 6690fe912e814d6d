// Recovery of what the previous server left in the same memory.
#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "lmcache/l1_core.h"

namespace lmcache {

namespace {

// The salt of slots that engines of the previous server may still write: their own is not known.
constexpr std::string_view kPreviousServerSalt = "(previous server)";

// Positions in `frames`, least recently used first. The counter of uses wraps around: the order begins after the widest
// gap.
std::vector<std::uint32_t> by_last_use(const std::vector<RecoveredFrame>& frames) {
    std::vector<std::uint32_t> order(frames.size());
    std::iota(order.begin(), order.end(), 0U);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::uint32_t a, std::uint32_t b) { return frames[a].last_use < frames[b].last_use; });
    std::size_t oldest = 0;
    std::uint32_t widest = 0;
    for (std::size_t i = 0; i < order.size(); ++i) {
        const std::size_t before = i == 0 ? order.size() - 1 : i - 1;
        const std::uint32_t gap = frames[order[i]].last_use - frames[order[before]].last_use;
        if (gap > widest) {
            widest = gap;
            oldest = i;
        }
    }
    std::rotate(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(oldest), order.end());
    return order;
}

}  // namespace

Recovered L1Core::recover(const RecoveredFrames& found, std::span<const std::optional<std::string>> salts,
                          std::span<const Owner> live_owners) {
    if (salts.size() != found.namespaces.size()) {
        throw std::invalid_argument("salts must hold one for each namespace that was found");
    }
    const MutexLock lock(mutex_);
    if (objects_.size() != 0) throw std::invalid_argument("only a core that never held anything can recover frames");
    Recovered recovered;
    for (const std::uint32_t unit : found.refused) slots_.clear(unit);
    recovered.refused = found.refused.size();
    quarantine_uncommitted(found, live_owners, recovered);
    std::vector<std::uint32_t> indexes(found.frames.size(), kNoObject);
    for (std::size_t i = 0; i < found.frames.size(); ++i) {
        const RecoveredFrame& frame = found.frames[i];
        const auto& salt = salts[frame.name_space];
        if (salt && recover_frame(frame, found.namespaces[frame.name_space].digest, *salt)) {
            indexes[i] = objects_.size() - 1;  // records are taken in order
            ++recovered.objects;
            recovered.size_bytes += bytes(frame.units);
        } else {
            slots_.clear(frame.first_unit);
            ++recovered.refused;
        }
    }
    for (const std::uint32_t position : by_last_use(found.frames)) {
        if (indexes[position] != kNoObject) make_newest(indexes[position]);
    }
    return recovered;
}

bool L1Core::recover_frame(const RecoveredFrame& frame, const Digest& digest, std::string_view salt) {
    const NamespaceReferences reference(namespaces_, {&digest, 1}, salt);
    const std::uint32_t name_space = reference.ids().front();
    const std::uint64_t key_hash = hash_key_(name_space, frame.hash.data());
    if (find(key_hash, name_space, frame.hash.data()) != kNoObject) return false;
    if (!arena_.allocate_at(frame.first_unit, frame.units, objects_.size())) return false;
    const std::uint32_t index = objects_.take();
    Object& object = objects_[index];
    object.hash = frame.hash;
    object.name_space = name_space;
    object.first_unit = frame.first_unit;
    object.units = frame.units;
    object.state = ObjectState::kResident;
    object.cycle = cycle_;
    keys_.insert(key_hash, index);
    charge(name_space, frame.units);
    order_.enter(index, key_hash);
    ++resident_;
    note_change(index, true);
    return true;
}

void L1Core::quarantine_uncommitted(const RecoveredFrames& found, std::span<const Owner> live_owners,
                                    Recovered& recovered) {
    const std::unordered_set<Owner> living(live_owners.begin(), live_owners.end());
    const Digest nobody{};
    std::unordered_map<Owner, Reservation> reservations;
    for (const UncommittedSlot& slot : found.slots) {
        if (!living.contains(slot.owner) || !arena_.allocate_at(slot.first_unit, slot.units, objects_.size())) {
            slots_.clear(slot.first_unit);
            continue;
        }
        const std::uint32_t index = objects_.take();
        Object& object = objects_[index];
        object.hash = {};
        const NamespaceReferences reference(namespaces_, {&nobody, 1}, kPreviousServerSalt);
        object.name_space = reference.ids().front();
        object.first_unit = slot.first_unit;
        object.units = slot.units;
        object.state = ObjectState::kQuarantined;
        slots_.set_staged(slot.first_unit, slot.units, owner_word(slot.owner));
        charge(object.name_space, slot.units);
        quarantined_units_ += slot.units;
        recovered.quarantined_bytes += bytes(slot.units);
        reservations[slot.owner].objects.push_back(index);
    }
    for (auto& [owner, reservation] : reservations) {
        reservation.owner = owner;
        reservation.deadline = std::numeric_limits<double>::infinity();
        reservation.chunks = reservation.objects.size();
        reservation.quarantined = true;
        recovered.quarantined.push_back({owner, reservations_.add(std::move(reservation))});
    }
}

}  // namespace lmcache
