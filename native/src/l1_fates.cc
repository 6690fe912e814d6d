// Why a key is not resident: what is remembered of those that left.
#include <cstring>

#include "lmcache/l1_core.h"

namespace lmcache {

// Numbers of namespaces end with their last object: here the first bytes of the digest stand for it.
std::uint64_t L1Core::fate_key(const Digest& digest, const std::uint8_t* hash) const {
    std::uint32_t name_space = 0;
    std::memcpy(&name_space, digest.data(), sizeof(name_space));
    return hash_key_(name_space, hash);
}

void L1Core::note_fate(std::uint32_t index, Fate fate) {
    static_assert(static_cast<std::uint8_t>(Fate::kBeingStored) <= Ghosts::kMaxValue);
    const Object& object = objects_[index];
    fates_.add(fate_key(namespaces_.digest_of(object.name_space), object.hash.data()), static_cast<std::uint8_t>(fate));
}

void L1Core::note_abandoned(const Reservation& reservation) {
    for (const std::uint32_t index : reservation.objects) {
        if (index != kNoObject) note_fate(index, Fate::kAbandoned);
    }
}

Fate L1Core::fate_of(NamespaceDigests namespaces, const std::uint8_t* hash) {
    const MutexLock lock(mutex_);
    for (const Digest& digest : namespaces) {
        const std::uint32_t name_space = namespaces_.find(digest);
        if (name_space != kNoNamespace) {
            const std::uint32_t index = find(hash_key_(name_space, hash), name_space, hash);
            if (index != kNoObject && objects_[index].state == ObjectState::kStaged) return Fate::kBeingStored;
            if (index != kNoObject) continue;
        }
        if (const auto fate = fates_.find(fate_key(digest, hash))) return static_cast<Fate>(*fate);
    }
    return Fate::kUnknown;
}

}  // namespace lmcache
