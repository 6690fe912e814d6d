// Taking over what a former server left in the same memory.
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

// Under what salt slots count that are set aside for engines of the former life: whose they are is not known.
constexpr std::string_view kSetAsideSalt = "(former server)";

// Positions in `frames`, least recently used first. The counter of uses wraps around: the order begins behind the
// widest gap.
std::vector<std::uint32_t> by_last_use(const std::vector<LeftFrame>& frames) {
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

Adopted L1Core::adopt(const LeftFrames& left, std::span<const std::optional<std::string>> salts,
                      std::span<const Owner> live_owners) {
    if (salts.size() != left.namespaces.size()) {
        throw std::invalid_argument("salts must hold one for each namespace that was left");
    }
    const std::lock_guard lock(mutex_);
    if (objects_.size() != 0) throw std::invalid_argument("only a core that never held anything can adopt");
    Adopted adopted;
    for (const std::uint32_t unit : left.refused) slots_.clear(unit);
    adopted.refused = left.refused.size();
    set_aside(left, live_owners, adopted);
    std::vector<std::uint32_t> indexes(left.frames.size(), kNoObject);
    for (std::size_t i = 0; i < left.frames.size(); ++i) {
        const LeftFrame& frame = left.frames[i];
        const auto& salt = salts[frame.name_space];
        if (salt && adopt_frame(frame, left.namespaces[frame.name_space].digest, *salt)) {
            indexes[i] = objects_.size() - 1;  // records are taken in order
            ++adopted.objects;
            adopted.size_bytes += bytes(frame.units);
        } else {
            slots_.clear(frame.first_unit);
            ++adopted.refused;
        }
    }
    for (const std::uint32_t position : by_last_use(left.frames)) {
        if (indexes[position] != kNoObject) make_newest(indexes[position]);
    }
    return adopted;
}

bool L1Core::adopt_frame(const LeftFrame& frame, const Digest& digest, std::string_view salt) {
    const NamespaceReferences reference(namespaces_, {&digest, 1}, salt);
    const std::uint32_t name_space = reference.ids().front();
    const std::uint64_t key_hash = hash_key(name_space, frame.hash.data());
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
    return true;
}

void L1Core::set_aside(const LeftFrames& left, std::span<const Owner> live_owners, Adopted& adopted) {
    const std::unordered_set<Owner> living(live_owners.begin(), live_owners.end());
    const Digest nobody{};
    std::unordered_map<Owner, Reservation> reservations;
    for (const LeftSlot& slot : left.slots) {
        if (!living.contains(slot.owner) || !arena_.allocate_at(slot.first_unit, slot.units, objects_.size())) {
            slots_.clear(slot.first_unit);
            continue;
        }
        const std::uint32_t index = objects_.take();
        Object& object = objects_[index];
        object.hash = {};
        const NamespaceReferences reference(namespaces_, {&nobody, 1}, kSetAsideSalt);
        object.name_space = reference.ids().front();
        object.first_unit = slot.first_unit;
        object.units = slot.units;
        object.state = ObjectState::kQuarantined;
        slots_.set_staged(slot.first_unit, slot.units, owner_word(slot.owner));
        charge(object.name_space, slot.units);
        quarantined_units_ += slot.units;
        adopted.set_aside_bytes += bytes(slot.units);
        reservations[slot.owner].objects.push_back(index);
    }
    for (auto& [owner, reservation] : reservations) {
        reservation.owner = owner;
        reservation.deadline = std::numeric_limits<double>::infinity();
        reservation.chunks = reservation.objects.size();
        reservation.quarantined = true;
        adopted.set_aside.emplace_back(owner, reservations_.add(std::move(reservation)));
    }
}

}  // namespace lmcache
