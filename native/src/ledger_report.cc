// What a ledger tells of itself: its changes, its figures, whether it is consistent.
#include <stdexcept>
#include <vector>

#include "lmcache/eviction/expect.h"
#include "lmcache/ledger.h"

namespace lmcache {

// ---- changes --------------------------------------------------------------------------------------------------------

std::uint64_t Ledger::watch_changes() {
    const MutexLock lock(mutex_);
    changes_.watch();
    return changes_.next();
}

void Ledger::unwatch_changes() {
    const MutexLock lock(mutex_);
    changes_.unwatch();
}

ChangePage Ledger::changes(std::uint64_t cursor, std::size_t most) const {
    return page_of(read_in_steps(cursor, most, [&](std::uint64_t from, std::size_t count) {
        const MutexLock lock(mutex_);
        return changes_.read(from, count);
    }));
}

std::vector<std::uint8_t> Ledger::known_in_all(std::span<const Digest> namespaces,
                                               std::span<const std::uint8_t> hashes) const {
    if (namespaces.empty()) throw std::invalid_argument("at least one namespace is needed");
    if (hashes.size() % kChunkHashBytes != 0) throw std::invalid_argument("hashes must be 32 bytes each");
    const MutexLock lock(mutex_);
    std::vector<std::uint8_t> known(hashes.size() / kChunkHashBytes, 1);
    for (const Digest& digest : namespaces) {
        const std::uint32_t number = namespaces_.find(digest);
        for (std::size_t chunk = 0; chunk < known.size(); ++chunk) {
            if (known[chunk] == 0) continue;
            const std::uint8_t* const hash = &hashes[chunk * kChunkHashBytes];
            const std::uint32_t index = find(hash_key_(number, hash), number, hash);
            known[chunk] = index != kNoObject && objects_[index].state != ObjectState::kDetached ? 1 : 0;
        }
    }
    return known;
}

// ---- figures --------------------------------------------------------------------------------------------------------

LedgerStats Ledger::stats() const {
    const MutexLock lock(mutex_);
    LedgerStats stats{};
    stats.objects = known_;
    stats.used_bytes = used_bytes_;
    stats.reserved_bytes = reserved_bytes_;
    stats.folders = folders_.size();
    stats.leaving_objects = leaving_;
    stats.read_objects = held_;
    stats.namespaces = namespaces_.size();
    stats.memory_bytes = objects_.memory_bytes() + keys_.memory_bytes() + namespaces_.memory_bytes() +
                         order_.memory_bytes() + folders_.memory_bytes() + encoded_.capacity() * sizeof(std::string) +
                         encoded_bytes_ + changes_.memory_bytes();
    return stats;
}

void Ledger::check() const {
    const MutexLock lock(mutex_);
    std::size_t records = 0, known = 0, leaving = 0, readers = 0;
    std::uint64_t used = 0, resident_bytes = 0;
    FolderCount folders;
    for (std::uint32_t index = 0; index < objects_.size(); ++index) {
        const Object& object = objects_[index];
        if (object.state == ObjectState::kUnused) continue;
        ++records;
        readers += object.readers;
        expect(find(hash_of(object), object.name_space, object.hash.data()) == index, "every record is found by key");
        expect(!encoded_.at(object.name_space).empty(), "the namespace of a record is known by name");
        if (object.state == ObjectState::kDetached) {
            expect(object.readers != 0, "a detached object has readers");
            continue;
        }
        ++known;
        leaving += object.state == ObjectState::kLeaving;
        used += object.charge();
        if (object.state == ObjectState::kResident) resident_bytes += object.charge();
        if (capacity_.folder_bytes != 0) folders.enter(object.name_space, object.hash[0]);
    }
    expect(keys_.size() == records, "the key table holds every record");
    expect(known == known_ && leaving == leaving_ && readers == held_, "counts of objects");
    expect(used == used_bytes_, "used bytes are the charges of what is known");
    expect(resident_bytes == namespaces_.total_units(), "the salts' bytes add up to what is resident");
    if (reserved_bytes_ == 0) expect(folders.size() == folders_.size(), "a folder counts while something is in it");
    order_.check();
}

}  // namespace lmcache
