#include "lmcache/fleet_directory.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "lmcache/rounding.h"

namespace lmcache {

namespace {

constexpr std::uint32_t kFirstSlots = 16;
constexpr std::uint32_t kLargeSize = 1U << 31;  // a size in pages follows
constexpr std::uint64_t kSizePageBytes = 4096;
constexpr std::size_t kAhead = 16;  // keys that are on their way from memory
constexpr std::uint16_t kMostAccesses = 65'535;
constexpr std::size_t kMostRecordsNumbered = std::size_t{1} << 31;

std::uint32_t home(std::uint64_t hash, std::uint32_t mask) { return static_cast<std::uint32_t>(hash) & mask; }

}  // namespace

FleetDirectory::FleetDirectory(std::uint64_t most_records) : most_records_(most_records) {
    if (most_records == 0 || most_records > kMostRecordsNumbered)
        throw std::invalid_argument("most_records must be from 1 to 2^31");
    for (Part& part : parts_) {
        part.slots = std::make_unique<std::uint32_t[]>(kFirstSlots);
        part.mask = kFirstSlots - 1;
    }
}

FleetDirectory::~FleetDirectory() = default;

// ---- sizes ---------------------------------------------------------------------------------------------------------
// Exact below 2 GiB, whole pages beyond.
std::uint32_t FleetDirectory::encode_size(std::uint64_t size_bytes) {
    if (size_bytes < kLargeSize) return static_cast<std::uint32_t>(size_bytes);
    const std::uint64_t pages = div_ceil(size_bytes, kSizePageBytes);
    return kLargeSize | static_cast<std::uint32_t>(std::min<std::uint64_t>(pages, kLargeSize - 1));
}

std::uint64_t FleetDirectory::decode_size(std::uint32_t size) {
    return size < kLargeSize ? size : (size & (kLargeSize - 1)) * kSizePageBytes;
}

// ---- the table -----------------------------------------------------------------------------------------------------
// A slot is the number of a record and 1; 0: empty.
std::uint32_t* FleetDirectory::find_slot(std::uint64_t hash, std::uint32_t scope,
                                         const std::uint8_t* chunk_hash) const {
    const Part& part = part_of(hash);
    for (std::uint32_t at = home(hash, part.mask); part.slots[at] != 0; at = (at + 1) & part.mask) {
        const Record& candidate = record(part.slots[at] - 1);
        if (candidate.scope == scope && std::memcmp(candidate.hash.data(), chunk_hash, kChunkHashBytes) == 0)
            return &part.slots[at];
    }
    return nullptr;
}

void FleetDirectory::insert(std::uint64_t hash, std::uint32_t index) {
    Part& part = part_of(hash);
    // From 55 to 78 % full, so that the parts, which fill up at the same pace, do not all grow in the same few calls.
    const std::uint64_t most = 141 + (hash >> 56) * 59 / 256;
    if (256 * (std::uint64_t{part.count} + 1) > most * (std::uint64_t{part.mask} + 1)) grow(part);
    std::uint32_t at = home(hash, part.mask);
    while (part.slots[at] != 0) at = (at + 1) & part.mask;
    part.slots[at] = index + 1;
    ++part.count;
    ++keys_;
}

void FleetDirectory::erase(std::uint64_t hash, std::uint32_t* slot) {
    Part& part = part_of(hash);
    auto hole = static_cast<std::uint32_t>(slot - part.slots.get());
    // Later slots of the run move back over the hole unless that would put them before their home.
    for (std::uint32_t at = (hole + 1) & part.mask; part.slots[at] != 0; at = (at + 1) & part.mask) {
        const std::uint32_t at_home = home(hash_of(record(part.slots[at] - 1)), part.mask);
        if (((at - at_home) & part.mask) >= ((at - hole) & part.mask)) {
            part.slots[hole] = part.slots[at];
            hole = at;
        }
    }
    part.slots[hole] = 0;
    --part.count;
    --keys_;
}

void FleetDirectory::grow(Part& part) {
    const std::uint32_t old_slots = part.mask + 1;
    const std::unique_ptr<std::uint32_t[]> old =
        std::exchange(part.slots, std::make_unique<std::uint32_t[]>(2 * std::size_t{old_slots}));
    part.mask = 2 * old_slots - 1;
    for (std::uint32_t i = 0; i < old_slots; ++i) {
        if (i + kAhead < old_slots && old[i + kAhead] != 0) __builtin_prefetch(&record(old[i + kAhead] - 1));
        if (old[i] == 0) continue;
        std::uint32_t at = home(hash_of(record(old[i] - 1)), part.mask);
        while (part.slots[at] != 0) at = (at + 1) & part.mask;
        part.slots[at] = old[i];
    }
}

void FleetDirectory::prefetch_slot(std::uint64_t hash) const {
    const Part& part = part_of(hash);
    __builtin_prefetch(&part.slots[home(hash, part.mask)]);
}

void FleetDirectory::prefetch_record(std::uint64_t hash) const {
    const Part& part = part_of(hash);
    const std::uint32_t slot = part.slots[home(hash, part.mask)];
    if (slot != 0) __builtin_prefetch(&record(slot - 1));
}

template <typename Visit>
void FleetDirectory::sweep_keys(const FleetKeys& keys, std::span<const std::uint32_t> scopes, Visit&& visit) const {
    std::vector<std::uint64_t> hashes(keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) hashes[i] = hash_key_(scopes[keys.positions[i]], keys.hash(i));
    for (std::size_t i = 0; i < keys.size() + kAhead; ++i) {
        if (i + kAhead < keys.size()) prefetch_slot(hashes[i + kAhead]);
        if (i < keys.size()) prefetch_record(hashes[i]);
        if (i >= kAhead) visit(i - kAhead, hashes[i - kAhead]);
    }
}

// ---- scopes --------------------------------------------------------------------------------------------------------
std::uint32_t FleetDirectory::known_scope(const std::string& encoded, const std::string& variant) const {
    const auto found = scopes_of_.find(encoded);
    if (found == scopes_of_.end()) return kNoRecord;
    for (const std::uint32_t number : found->second) {
        if (scopes_[number].variant == variant) return number;
    }
    return kNoRecord;
}

std::uint32_t FleetDirectory::add_scope(const std::string& encoded, const std::string& variant) {
    if (const std::uint32_t known = known_scope(encoded, variant); known != kNoRecord) return known;
    if (const auto others = scopes_of_.find(encoded); others != scopes_of_.end()) {
        if (others->second.size() >= kMostVariants) return kNoRecord;
    }
    std::uint32_t number = 0;
    if (free_scopes_.empty()) {
        if (scopes_.size() >= kMostScopes) return kNoRecord;
        number = static_cast<std::uint32_t>(scopes_.size());
        scopes_.emplace_back();
    } else {
        number = free_scopes_.back();
        free_scopes_.pop_back();
    }
    const auto entry = scopes_of_.try_emplace(encoded).first;
    entry->second.push_back(number);
    scopes_[number] = {&entry->first, variant, 0, 0};
    scope_bytes_ += encoded.size() + variant.size();
    return number;
}

void FleetDirectory::forget_scope(std::uint32_t number) {
    Scope& scope = scopes_[number];
    scope_bytes_ -= scope.encoded->size() + scope.variant.size();
    const auto entry = scopes_of_.find(*scope.encoded);
    std::erase(entry->second, number);
    if (entry->second.empty()) scopes_of_.erase(entry);
    scope = {};
    free_scopes_.push_back(number);
}

// ---- holders -------------------------------------------------------------------------------------------------------
const FleetDirectory::Holder& FleetDirectory::checked(std::uint32_t holder) const {
    if (holder >= holders_.size() || !holders_[holder].in_use) throw std::invalid_argument("there is no such holder");
    return holders_[holder];
}

std::uint32_t FleetDirectory::add_holder(std::uint32_t place) {
    const MutexLock lock(mutex_);
    std::uint32_t number = 0;
    if (free_holders_.empty()) {
        if (holders_.size() >= kMostHolders) throw std::length_error("the directory has no room for another holder");
        number = static_cast<std::uint32_t>(holders_.size());
        holders_.emplace_back();
    } else {
        number = free_holders_.back();
        free_holders_.pop_back();
    }
    holders_[number] = {.place = place, .in_use = true};
    return number;
}

void FleetDirectory::void_holder(std::uint32_t holder) {
    const MutexLock lock(mutex_);
    if (checked(holder).is_void) return;
    Holder& voided = holders_[holder];
    voided.is_void = true;
    if (voided.objects == 0) {
        voided = {};
        free_holders_.push_back(holder);
        return;
    }
    void_records_ += voided.objects;
}

FleetHolderStats FleetDirectory::holder_stats(std::uint32_t holder) const {
    const MutexLock lock(mutex_);
    const Holder& found = checked(holder);
    return {found.objects, found.bytes};
}

// ---- records -------------------------------------------------------------------------------------------------------
std::uint32_t FleetDirectory::take_record() {
    if (free_ != kNoRecord) {
        const std::uint32_t index = free_;
        free_ = record(index).next;
        return index;
    }
    if (end_ == blocks_.size() << kBlockBits) blocks_.push_back(std::make_unique<Record[]>(kBlockRecords));
    return end_++;
}

void FleetDirectory::charge(Record& of, std::uint16_t holder, std::uint32_t size) {
    of.holder = holder;
    of.size = size;
    const std::uint64_t size_bytes = decode_size(size);
    ++holders_[holder].objects;
    holders_[holder].bytes += size_bytes;
    ++scopes_[of.scope].records;
    scopes_[of.scope].bytes += size_bytes;
}

void FleetDirectory::discharge(const Record& of) {
    const std::uint64_t size_bytes = decode_size(of.size);
    Holder& holder = holders_[of.holder];
    --holder.objects;
    holder.bytes -= size_bytes;
    --scopes_[of.scope].records;
    scopes_[of.scope].bytes -= size_bytes;
    if (!holder.is_void) return;
    --void_records_;
    if (holder.objects == 0) {
        holder = {};
        free_holders_.push_back(of.holder);
    }
}

void FleetDirectory::drop(std::uint64_t hash, std::uint32_t* slot, std::uint32_t previous, std::uint32_t index) {
    Record& dropped = record(index);
    if (previous != kNoRecord) {
        record(previous).next = dropped.next;
    } else if (dropped.next != kNoRecord) {
        record(dropped.next).accesses = dropped.accesses;
        *slot = dropped.next + 1;
    } else {
        erase(hash, slot);
    }
    discharge(dropped);
    const std::uint32_t scope = dropped.scope;
    dropped.holder = kFreeRecord;
    dropped.next = free_;
    free_ = index;
    --records_;
    if (scopes_[scope].records == 0) forget_scope(scope);
}

std::size_t FleetDirectory::store(std::uint32_t holder, const FleetKeys& keys,
                                  std::span<const std::uint64_t> sizes_bytes) {
    if (sizes_bytes.size() != keys.size()) throw std::invalid_argument("sizes_bytes must have one number a key");
    const MutexLock lock(mutex_);
    if (checked(holder).is_void) throw std::invalid_argument("the holder is void");
    const std::uint32_t place = holders_[holder].place;
    std::vector<std::uint32_t> scopes(keys.scopes.size());
    for (std::size_t i = 0; i < scopes.size(); ++i) scopes[i] = add_scope(keys.scopes[i], keys.variant);
    std::size_t held = 0;
    sweep_keys(keys, scopes, [&](std::size_t i, std::uint64_t hash) {
        mutex_.assert_held();
        const std::uint32_t scope = scopes[keys.positions[i]];
        if (scope == kNoRecord) return;
        const std::uint32_t size = encode_size(sizes_bytes[i]);
        const std::uint32_t* const slot = find_slot(hash, scope, keys.hash(i));
        const std::uint32_t first = slot != nullptr ? *slot - 1 : kNoRecord;
        for (std::uint32_t at = first; at != kNoRecord; at = record(at).next) {
            Record& known = record(at);
            const Holder& of = holders_[known.holder];
            if (of.place != place) continue;
            // Counted anew before the old count ends, so that the scope is not forgotten meanwhile.
            const Record before = known;
            charge(known, static_cast<std::uint16_t>(holder), size);
            discharge(before);
            ++held;
            return;
        }
        if (records_ >= most_records_) return;
        const std::uint32_t index = take_record();
        Record& added = record(index);
        std::memcpy(added.hash.data(), keys.hash(i), kChunkHashBytes);
        added.scope = scope;
        added.accesses = 0;
        added.next = kNoRecord;
        charge(added, static_cast<std::uint16_t>(holder), size);
        ++records_;
        ++held;
        if (first != kNoRecord) {
            added.next = record(first).next;
            record(first).next = index;
        } else {
            insert(hash, index);
        }
    });
    for (const std::uint32_t scope : scopes) {
        if (scope == kNoRecord || scopes_[scope].encoded == nullptr) continue;
        if (scopes_[scope].records == 0) forget_scope(scope);
    }
    return held;
}

std::size_t FleetDirectory::remove(std::uint32_t holder, const FleetKeys& keys) {
    const MutexLock lock(mutex_);
    const std::uint32_t place = checked(holder).place;
    std::size_t removed = 0;
    std::vector<std::uint32_t> scopes(keys.scopes.size());
    for (std::size_t i = 0; i < scopes.size(); ++i) scopes[i] = known_scope(keys.scopes[i], keys.variant);
    sweep_keys(keys, scopes, [&](std::size_t i, std::uint64_t hash) {
        mutex_.assert_held();
        const std::uint32_t scope = scopes[keys.positions[i]];
        if (scope == kNoRecord) return;
        std::uint32_t* const slot = find_slot(hash, scope, keys.hash(i));
        if (slot == nullptr) return;
        std::uint32_t previous = kNoRecord;
        for (std::uint32_t at = *slot - 1; at != kNoRecord; previous = at, at = record(at).next) {
            if (holders_[record(at).holder].place != place) continue;
            removed += !holders_[record(at).holder].is_void;
            drop(hash, slot, previous, at);
            return;
        }
    });
    return removed;
}

std::size_t FleetDirectory::count_accesses(const FleetKeys& keys) {
    const MutexLock lock(mutex_);
    std::size_t known = 0;
    std::vector<std::uint32_t> scopes(keys.scopes.size());
    for (std::size_t i = 0; i < scopes.size(); ++i) scopes[i] = known_scope(keys.scopes[i], keys.variant);
    sweep_keys(keys, scopes, [&](std::size_t i, std::uint64_t hash) {
        mutex_.assert_held();
        const std::uint32_t scope = scopes[keys.positions[i]];
        if (scope == kNoRecord) return;
        if (const std::uint32_t* const slot = find_slot(hash, scope, keys.hash(i)); slot != nullptr) {
            std::uint16_t& accesses = record(*slot - 1).accesses;
            if (accesses < kMostAccesses) ++accesses;
            ++known;
        }
    });
    return known;
}

// ---- answers -------------------------------------------------------------------------------------------------------
FleetPage FleetDirectory::lookup(const FleetKeys& keys, std::size_t most_copies) const {
    FleetPage page;
    const MutexLock lock(mutex_);
    std::vector<std::size_t> copies(keys.size(), 0);
    std::size_t most_variants = 0;
    std::vector<const std::vector<std::uint32_t>*> variants(keys.scopes.size(), nullptr);
    for (std::size_t i = 0; i < keys.scopes.size(); ++i) {
        const auto found = scopes_of_.find(keys.scopes[i]);
        if (found == scopes_of_.end()) continue;
        variants[i] = &found->second;
        most_variants = std::max(most_variants, found->second.size());
    }
    std::map<std::uint32_t, std::uint32_t> positions;  // in the page, by the number of a scope
    std::vector<std::uint32_t> scopes(keys.scopes.size());
    for (std::size_t round = 0; round < most_variants; ++round) {
        for (std::size_t i = 0; i < scopes.size(); ++i) {
            const bool is_there = variants[i] != nullptr && round < variants[i]->size();
            scopes[i] = is_there ? (*variants[i])[round] : kNoRecord;
        }
        sweep_keys(keys, scopes, [&](std::size_t i, std::uint64_t hash) {
            mutex_.assert_held();
            const std::uint32_t scope = scopes[keys.positions[i]];
            if (scope == kNoRecord) return;
            const std::uint32_t* const slot = find_slot(hash, scope, keys.hash(i));
            if (slot == nullptr) return;
            const std::uint16_t accesses = record(*slot - 1).accesses;
            for (std::uint32_t at = *slot - 1; at != kNoRecord && copies[i] < most_copies; at = record(at).next) {
                const Record& found = record(at);
                if (holders_[found.holder].is_void) continue;
                const auto [known, is_new] =
                    positions.try_emplace(scope, static_cast<std::uint32_t>(page.scopes.size()));
                if (is_new) {
                    page.scopes.push_back(*scopes_[scope].encoded);
                    page.variants.push_back(scopes_[scope].variant);
                }
                page.positions.push_back(known->second);
                page.keys.push_back(static_cast<std::uint32_t>(i));
                page.holders.push_back(found.holder);
                page.sizes_bytes.push_back(decode_size(found.size));
                page.access_counts.push_back(accesses);
                ++copies[i];
            }
        });
    }
    return page;
}

FleetPage FleetDirectory::list(std::uint32_t start, std::size_t most, std::size_t most_examined,
                               std::span<const std::uint32_t> holders) const {
    FleetPage page;
    const MutexLock lock(mutex_);
    std::vector<bool> wanted(holders.empty() ? 0 : kMostHolders);
    for (const std::uint32_t holder : holders) {
        if (holder < kMostHolders) wanted[holder] = true;
    }
    std::map<std::uint32_t, std::uint32_t> positions;
    std::uint32_t at = start;
    for (std::size_t examined = 0; at < end_ && page.positions.size() < most && examined < most_examined;
         ++at, ++examined) {
        const Record& found = record(at);
        if (found.holder == kFreeRecord || holders_[found.holder].is_void) continue;
        if (!wanted.empty() && !wanted[found.holder]) continue;
        const auto [known, is_new] = positions.try_emplace(found.scope, static_cast<std::uint32_t>(page.scopes.size()));
        if (is_new) {
            page.scopes.push_back(*scopes_[found.scope].encoded);
            page.variants.push_back(scopes_[found.scope].variant);
        }
        page.positions.push_back(known->second);
        page.hashes.insert(page.hashes.end(), found.hash.begin(), found.hash.end());
        page.holders.push_back(found.holder);
        page.sizes_bytes.push_back(decode_size(found.size));
        page.access_counts.push_back(found.accesses);
    }
    page.next_start = at < end_ ? at : 0;
    return page;
}

FleetPage FleetDirectory::scopes() const {
    FleetPage page;
    const MutexLock lock(mutex_);
    for (const Scope& scope : scopes_) {
        if (scope.encoded == nullptr) continue;
        page.positions.push_back(static_cast<std::uint32_t>(page.scopes.size()));
        page.scopes.push_back(*scope.encoded);
        page.variants.push_back(scope.variant);
        page.sizes_bytes.push_back(scope.bytes);
    }
    return page;
}

bool FleetDirectory::sweep(std::size_t most_examined) {
    const MutexLock lock(mutex_);
    for (std::size_t examined = 0; examined < most_examined && void_records_ > 0; ++examined) {
        if (sweep_at_ >= end_) sweep_at_ = 0;
        const std::uint32_t index = sweep_at_++;
        const Record& found = record(index);
        if (found.holder == kFreeRecord || !holders_[found.holder].is_void) continue;
        const std::uint64_t hash = hash_of(found);
        std::uint32_t* const slot = find_slot(hash, found.scope, found.hash.data());
        std::uint32_t previous = kNoRecord;
        for (std::uint32_t at = *slot - 1; at != index; at = record(at).next) previous = at;
        drop(hash, slot, previous, index);
    }
    return void_records_ > 0;
}

FleetStats FleetDirectory::stats() const {
    const MutexLock lock(mutex_);
    std::uint64_t memory_bytes = sizeof(*this) + blocks_.size() * kBlockRecords * sizeof(Record) +
                                 holders_.capacity() * sizeof(Holder) + scopes_.capacity() * sizeof(Scope) +
                                 scope_bytes_;
    for (const Part& part : parts_) memory_bytes += (std::uint64_t{part.mask} + 1) * sizeof(std::uint32_t);
    return {keys_,
            records_ - void_records_,
            void_records_,
            scopes_.size() - free_scopes_.size(),
            holders_.size() - free_holders_.size(),
            memory_bytes};
}

void FleetDirectory::check() const {
    const MutexLock lock(mutex_);
    const auto expect = [](bool holds, const char* invariant) {
        if (!holds) throw std::runtime_error(invariant);
    };
    std::vector<FleetHolderStats> held(holders_.size());
    std::vector<std::uint64_t> in_scope(scopes_.size()), bytes_in_scope(scopes_.size());
    std::uint64_t records = 0, void_records = 0, firsts = 0, free_records = 0;
    for (std::uint32_t index = 0; index < end_; ++index) {
        const Record& found = record(index);
        if (found.holder == kFreeRecord) {
            ++free_records;
            continue;
        }
        ++records;
        expect(found.holder < holders_.size() && holders_[found.holder].in_use, "a record has no holder");
        ++held[found.holder].objects;
        held[found.holder].bytes += decode_size(found.size);
        void_records += holders_[found.holder].is_void;
        ++in_scope[found.scope];
        bytes_in_scope[found.scope] += decode_size(found.size);
        const std::uint32_t* const slot = find_slot(hash_of(found), found.scope, found.hash.data());
        expect(slot != nullptr, "a record's key is not in the table");
        firsts += *slot - 1 == index;
        std::size_t same_place = 0, seen = 0;
        for (std::uint32_t at = *slot - 1; at != kNoRecord; at = record(at).next) {
            expect(record(at).scope == found.scope && record(at).hash == found.hash, "a list has two keys");
            same_place += holders_[record(at).holder].place == holders_[found.holder].place;
            seen += at == index;
        }
        expect(seen == 1, "a record is not once in the list of its key");
        expect(same_place == 1, "a place has two records of a key");
    }
    std::uint64_t listed_free = 0;
    for (std::uint32_t at = free_; at != kNoRecord; at = record(at).next) ++listed_free;
    expect(listed_free == free_records, "a free record is not in the free list");
    expect(records == records_ && void_records == void_records_ && firsts == keys_, "the counts do not hold");
    for (std::size_t i = 0; i < holders_.size(); ++i) {
        expect(held[i].objects == holders_[i].objects && held[i].bytes == holders_[i].bytes,
               "a holder's figures are not those of its records");
    }
    for (std::size_t i = 0; i < scopes_.size(); ++i) {
        expect(in_scope[i] == scopes_[i].records && bytes_in_scope[i] == scopes_[i].bytes,
               "a scope's figures are not those of its records");
        expect((scopes_[i].encoded != nullptr) == (in_scope[i] > 0), "a scope without records is known");
    }
}

}  // namespace lmcache
