#include "lmcache/raw_index.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "lmcache/rounding.h"

namespace lmcache {
namespace {

template <typename T>
T* zeroed(std::size_t count) {
    void* const memory = std::calloc(std::max<std::size_t>(count, 1), sizeof(T));
    if (memory == nullptr) throw std::bad_alloc();
    return static_cast<T*>(memory);
}

std::uint64_t hash_of_key(std::uint32_t space, const void* hash) {
    std::uint64_t word;
    std::memcpy(&word, hash, sizeof word);
    return word ^ (std::uint64_t{space} * 0x9E37'79B9'7F4A'7C15);
}

void need(bool condition, const char* sentence) {
    if (!condition) throw std::invalid_argument(sentence);
}

}  // namespace

RawIndex::RawIndex(const RawIndexOptions& options)
    : options_(options),
      entries_per_page_(options.page_bytes <= kPageHeaderBytes + sizeof(RawEntry)
                            ? 1
                            : static_cast<std::uint32_t>((options.page_bytes - kPageHeaderBytes) / sizeof(RawEntry))),
      pages_(div_ceil(options.slots, entries_per_page_)),
      entries_(zeroed<RawEntry>(std::size_t{pages_} * entries_per_page_)),
      spaces_of_slots_(zeroed<std::uint32_t>(options.slots)),
      free_(options.slots),
      stale_(options.slots),
      awaited_(options.slots),
      dirty_(pages_),
      scratch_(options.page_bytes),
      next_generation_(options.first_generation),
      first_generation_(options.first_generation) {
    need(options.slots != 0 && options.slots < (1U << 31), "slots must be between 1 and 2^31 - 1");
    need(options.page_bytes >= 4096 && options.slot_bytes >= kFrameHeaderBytes, "pages and slots have 4096 or more");
    need(options.frame_limit_bytes <= options.slot_bytes, "an object must fit a slot");
}

std::uint32_t RawIndex::check_slot(std::uint32_t slot) const {
    need(slot < options_.slots, "there is no such slot");
    return slot;
}

std::uint32_t RawIndex::intern(std::span<const std::byte, kDigestBytes> digest, std::uint32_t number) {
    auto id = static_cast<std::uint32_t>(spaces_.size());
    if (unused_spaces_.empty()) {
        spaces_.emplace_back();
    } else {
        id = unused_spaces_.back();
        unused_spaces_.pop_back();
    }
    Space& space = spaces_[id];
    std::memcpy(space.digest.data(), digest.data(), kDigestBytes);
    space.number = number;
    space.references = 0;
    space.is_known = true;
    retain(id);  // idle unless it gets an object
    release(id);
    return id;
}

void RawIndex::release(std::uint32_t space) {
    if (--spaces_[space].references == 0 && !std::exchange(spaces_[space].is_idle, true)) idle_spaces_.push_back(space);
}

std::vector<std::uint32_t> RawIndex::take_unused_spaces() {
    std::vector<std::uint32_t> unused;
    for (const std::uint32_t id : idle_spaces_) {
        Space& space = spaces_[id];
        space.is_idle = false;
        if (space.references == 0 && std::exchange(space.is_known, false)) unused.push_back(id);
    }
    idle_spaces_.clear();
    unused_spaces_.insert(unused_spaces_.end(), unused.begin(), unused.end());
    return unused;
}

void RawIndex::enter(RawBatch& batch, const RawKeys& keys, std::size_t position, std::uint32_t slot,
                     std::uint64_t generation, const Transfer& transfer) {
    batch.transfers.push_back(transfer);
    auto& element = batch.elements.emplace_back(
        RawBatch::Element{static_cast<std::uint32_t>(position), keys.spaces[position], slot, generation, {}});
    std::memcpy(element.hash.data(), keys.hash(position).data(), kChunkHashBytes);
    retain(element.space);
}

// ---- keys and slots ------------------------------------------------------------------------------------------------
std::uint64_t RawIndex::hash_of(std::uint32_t slot) const {
    return hash_of_key(spaces_of_slots_[slot], entries_[slot].hash);
}

std::uint32_t RawIndex::find(std::uint32_t space, std::span<const std::byte, kChunkHashBytes> hash) const {
    return table_.find(hash_of_key(space, hash.data()), [&](std::uint32_t slot) {
        return spaces_of_slots_[slot] == space && std::memcmp(entries_[slot].hash, hash.data(), kChunkHashBytes) == 0;
    });
}

void RawIndex::claim(std::uint32_t slot, std::uint32_t space, const RawEntry& entry) {
    entries_[slot] = entry;
    spaces_of_slots_[slot] = space;
    retain(space);
    table_.insert(hash_of(slot), slot);
    ++objects_;
    object_bytes_ += entry.units * kUnitBytes;
}

void RawIndex::unclaim(std::uint32_t slot) {
    table_.erase(hash_of(slot), slot);
    release(spaces_of_slots_[slot]);
    --objects_;
    object_bytes_ -= entries_[slot].units * kUnitBytes;
    const std::uint64_t generation = entries_[slot].generation;
    entries_[slot] = {};
    entries_[slot].generation = generation;
}

std::uint32_t RawIndex::take_slot() {
    const std::uint32_t slot = free_.take_lowest();
    if (slot != BitSet::kNone) {
        stale_.erase(slot);
        return slot;
    }
    if (suspects_.empty()) return BitSet::kNone;
    const std::uint32_t last_resort = suspects_.back();
    suspects_.pop_back();
    return last_resort;
}

void RawIndex::put_back(std::uint32_t slot, bool suspect) {
    if (suspect) {
        suspects_.push_back(slot);
        return;
    }
    free_.insert(slot);
    if (entries_[slot].generation != 0) stale_.insert(slot);
}

SlotPlace RawIndex::place(std::uint32_t slot, std::uint64_t generation) const {
    SlotPlace result{};
    std::memcpy(result.device, options_.device, sizeof result.device);
    result.slot = slot;
    result.generation = generation;
    return result;
}

std::uint64_t RawIndex::use_time(std::uint64_t now, std::size_t count) {
    last_used_ = std::max(now, last_used_ + count);
    return last_used_;
}

// ---- storing -------------------------------------------------------------------------------------------------------
RawBatch RawIndex::begin_store(const RawKeys& keys, std::span<const std::uint64_t> addresses,
                               std::span<const std::uint64_t> sizes, std::byte* heads) {
    const std::size_t count = keys.size();
    need(addresses.size() == count && sizes.size() == count, "keys, addresses and sizes must have the same length");
    RawBatch batch;
    batch.codes.resize(count);
    std::vector<std::size_t> todo;
    for (std::size_t i = 0; i < count; ++i) {
        need(keys.spaces[i] < spaces_.size() && spaces_[keys.spaces[i]].is_known, "there is no such namespace");
        StoreCode code = StoreCode::kFull;
        if (find(keys.spaces[i], keys.hash(i)) != kNoObject)
            code = StoreCode::kAlreadyThere;
        else if (sizes[i] > options_.frame_limit_bytes)
            code = StoreCode::kTooLarge;
        else
            todo.push_back(i);
        batch.codes[i] = static_cast<std::uint8_t>(code);
    }
    // Ascending, so that of a batch that is interrupted a prefix is there.
    std::vector<std::uint32_t> slots;
    while (slots.size() < todo.size()) {
        const std::uint32_t slot = take_slot();
        if (slot == BitSet::kNone) break;
        slots.push_back(slot);
    }
    std::sort(slots.begin(), slots.end());
    for (std::size_t taken = 0; taken < slots.size(); ++taken) {
        const std::size_t i = todo[taken];
        const std::uint32_t slot = slots[taken];
        const std::uint64_t generation = next_generation_++;
        std::byte* const head = heads + i * kFrameHeaderBytes;
        const auto* const frame = reinterpret_cast<const std::byte*>(addresses[i]);
        const std::span<const std::byte, kDigestBytes> digest(spaces_[keys.spaces[i]].digest);
        batch.codes[i] = static_cast<std::uint8_t>(StoreCode::kFailed);
        if (slot_header_seal(frame, sizes[i], head, place(slot, generation), digest, keys.hash(i)).fault !=
            SlotFault::kNone) {
            put_back(slot, false);
            continue;
        }
        enter(batch, keys, i, slot, generation,
              {offset_of(slot), addresses[i], sizes[i], reinterpret_cast<std::uint64_t>(head)});
    }
    return batch;
}

std::vector<std::uint32_t> RawIndex::end_store(RawBatch& batch, std::span<const std::int32_t> errors,
                                               std::uint64_t now) {
    const std::size_t count = batch.transfers.size();
    need(errors.size() == count, "there must be an errno for each transfer");
    const std::uint64_t used_at = use_time(now, count);
    std::vector<std::uint32_t> dirty;
    for (std::size_t i = 0; i < count; ++i) {
        const RawBatch::Element& element = batch.elements[i];
        const std::uint32_t slot = element.slot, space = element.space;
        const bool is_full = errors[i] == ENOSPC || errors[i] == EDQUOT;
        StoreCode code = StoreCode::kStored;
        if (errors[i] != 0)
            code = is_full ? StoreCode::kFull : StoreCode::kFailed;
        else if (find(space, element.hash) != kNoObject)
            code = StoreCode::kAlreadyThere;  // by another call, meanwhile
        else if (element.generation < first_generation_)
            code = StoreCode::kFailed;  // everything was removed meanwhile
        batch.set_code(element, code);
        if (code != StoreCode::kStored) {
            entries_[slot].generation = element.generation;  // its header may be there
            put_back(slot, errors[i] != 0 && !is_full);
            release(space);
            continue;
        }
        RawEntry entry{};
        std::memcpy(entry.hash, element.hash.data(), kChunkHashBytes);
        entry.number = spaces_[space].number;
        entry.units = static_cast<std::uint32_t>(div_ceil(batch.transfers[i].size, kUnitBytes));
        entry.generation = element.generation;
        entry.used_at = used_at - i;
        claim(slot, space, entry);
        release(space);
        if (dirty.empty() || dirty.back() != page_of(slot)) dirty.push_back(page_of(slot));
    }
    return dirty;
}

// ---- loading -------------------------------------------------------------------------------------------------------
RawBatch RawIndex::begin_load(const RawKeys& keys, std::span<const std::uint64_t> addresses,
                              std::span<const std::uint64_t> sizes) {
    const std::size_t count = keys.size();
    need(addresses.size() == count && sizes.size() == count, "keys, addresses and sizes must have the same length");
    RawBatch batch;
    batch.codes.assign(count, static_cast<std::uint8_t>(LoadCode::kMissing));
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t slot = find(keys.spaces[i], keys.hash(i));
        if (slot == kNoObject) continue;
        ++readers_[slot];
        const std::uint64_t size = std::min<std::uint64_t>(entries_[slot].units * kUnitBytes, sizes[i]);
        enter(batch, keys, i, slot, entries_[slot].generation, {offset_of(slot), addresses[i], size, 0});
    }
    return batch;
}

std::vector<std::uint32_t> RawIndex::end_load(RawBatch& batch, std::span<const std::int64_t> results,
                                              std::span<const std::int32_t> errors, std::uint64_t now) {
    const std::size_t count = batch.transfers.size();
    need(results.size() == count && errors.size() == count, "there must be a result and an errno for each transfer");
    const std::uint64_t used_at = use_time(now, count);
    std::vector<std::uint32_t> corrupt;
    for (std::size_t i = 0; i < count; ++i) {
        const RawBatch::Element& element = batch.elements[i];
        const std::uint32_t slot = element.slot;
        LoadCode code = LoadCode::kFailed;
        if (errors[i] == 0) {
            const SlotVerdict verdict = slot_header_open(
                reinterpret_cast<std::byte*>(batch.transfers[i].address), static_cast<std::uint64_t>(results[i]),
                place(slot, element.generation), spaces_[element.space].digest, element.hash);
            code = verdict.fault == SlotFault::kNone ? LoadCode::kLoaded : LoadCode::kCorrupt;
        }
        batch.set_code(element, code);
        if (claims(slot, element.generation)) {  // else it was deleted, or stored anew, meanwhile
            if (code == LoadCode::kCorrupt) corrupt.push_back(element.position);
            if (code == LoadCode::kLoaded) {
                entries_[slot].used_at = used_at - i;
                dirty_.insert(page_of(slot));
            }
        }
        release(element.space);
        const auto reader = readers_.find(slot);
        if (--reader->second != 0) continue;
        readers_.erase(reader);
        if (awaited_.contains(slot)) {
            awaited_.erase(slot);
            put_back(slot, false);
        }
    }
    return corrupt;
}

// ---- looking -------------------------------------------------------------------------------------------------------
std::vector<std::uint64_t> RawIndex::sizes_of(const RawKeys& keys) const {
    std::vector<std::uint64_t> sizes(keys.size());
    for (std::size_t i = 0; i < sizes.size(); ++i) {
        const std::uint32_t slot = find(keys.spaces[i], keys.hash(i));
        if (slot != kNoObject) sizes[i] = entries_[slot].units * kUnitBytes;
    }
    return sizes;
}

std::vector<std::uint32_t> RawIndex::claimed_from(std::uint32_t first, std::size_t count) const {
    std::vector<std::uint32_t> slots;
    for (std::uint32_t slot = first; slot < options_.slots && slots.size() < count; ++slot)
        if (entries_[slot].units != 0) slots.push_back(slot);
    return slots;
}

bool RawIndex::header_fits(std::uint32_t slot, const std::byte* header) const {
    const RawEntry& claimed = entries_[slot];
    FrameHeader copy;
    std::memcpy(&copy, header, sizeof copy);
    SlotPlace found;
    if (slot_header_parse(copy, found).fault != SlotFault::kNone) return false;
    const SlotPlace wanted = place(slot, claimed.generation);
    return std::memcmp(&found, &wanted, sizeof found) == 0 &&
           std::memcmp(copy.chunk_hash, claimed.hash, kChunkHashBytes) == 0 &&
           std::memcmp(copy.namespace_digest, spaces_[spaces_of_slots_[slot]].digest.data(), kDigestBytes) == 0;
}

std::vector<std::uint32_t> RawIndex::misplaced(std::span<const std::uint32_t> slots,
                                               std::span<const std::uint64_t> generations, const std::byte* headers,
                                               std::span<const std::int64_t> results,
                                               std::span<const std::int32_t> errors) const {
    const std::size_t count = slots.size();
    need(generations.size() == count && results.size() == count && errors.size() == count,
         "there must be a generation, a result and an errno for each slot");
    std::vector<std::uint32_t> wrong;
    for (std::size_t i = 0; i < count; ++i) {
        if (errors[i] != 0 || !claims(check_slot(slots[i]), generations[i])) continue;
        const bool whole = results[i] == static_cast<std::int64_t>(kFrameHeaderBytes);
        if (!whole || !header_fits(slots[i], headers + i * kFrameHeaderBytes)) wrong.push_back(slots[i]);
    }
    return wrong;
}

// ---- removing ------------------------------------------------------------------------------------------------------
std::vector<std::uint32_t> RawIndex::remove(const RawKeys& keys) {
    std::vector<std::uint32_t> gone;
    for (std::size_t i = 0; i < keys.size(); ++i) {
        const std::uint32_t slot = find(keys.spaces[i], keys.hash(i));
        if (slot == kNoObject) continue;
        unclaim(slot);
        gone.push_back(slot);
    }
    return gone;
}

std::vector<std::uint32_t> RawIndex::remove_all() {
    std::vector<std::uint32_t> gone = claimed_from(0, objects_);
    for (const std::uint32_t slot : gone) unclaim(slot);
    // No header of before counts any more, so none has to be erased.
    entries_.reset(zeroed<RawEntry>(std::size_t{pages_} * entries_per_page_));
    stale_ = BitSet(options_.slots);
    dirty_ = BitSet(pages_);
    first_generation_ = next_generation_;
    return gone;
}

void RawIndex::release_slots(std::span<const std::uint32_t> slots) {
    for (const std::uint32_t slot : slots) {
        if (readers_.contains(check_slot(slot)))
            awaited_.insert(slot);
        else
            put_back(slot, false);
    }
}

std::vector<std::uint32_t> RawIndex::take_stale(std::uint32_t first, std::size_t count) {
    std::vector<std::uint32_t> slots;
    for (std::uint32_t slot = stale_.lowest(first); slot != BitSet::kNone && slots.size() < count;
         slot = stale_.lowest(slot + 1)) {
        stale_.erase(slot);
        free_.erase(slot);
        slots.push_back(slot);
    }
    return slots;
}

void RawIndex::end_erase(std::span<const std::uint32_t> slots, std::span<const std::int32_t> errors) {
    need(slots.size() == errors.size(), "there must be an errno for each slot");
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const std::uint32_t slot = check_slot(slots[i]);
        if (errors[i] == 0) {
            entries_[slot].generation = 0;
            dirty_.insert(page_of(slot));
        }
        put_back(slot, errors[i] != 0);
    }
}

void RawIndex::check() const {
    const auto must = [](bool condition, const char* what) {
        if (!condition) throw std::runtime_error(std::string("RawIndex: ") + what);
    };
    std::vector<std::uint32_t> references(spaces_.size());
    std::size_t objects = 0;
    std::uint64_t bytes = 0;
    for (std::uint32_t slot = 0; slot < options_.slots; ++slot) {
        const bool is_free = free_.contains(slot);
        if (entries_[slot].units != 0) {
            ++objects;
            ++references[spaces_of_slots_[slot]];
            bytes += entries_[slot].units * kUnitBytes;
            must(!is_free && !awaited_.contains(slot), "a claimed slot is not free");
            must(find(spaces_of_slots_[slot], std::span<const std::byte, kChunkHashBytes>(
                                                  reinterpret_cast<const std::byte*>(entries_[slot].hash), 32)) == slot,
                 "a claimed slot is found by its key");
        }
        must(stale_.contains(slot) == (is_free && entries_[slot].generation != 0), "a free slot keeps a generation");
    }
    for (std::uint32_t space = 0; space < spaces_.size(); ++space) {
        must(spaces_[space].references >= references[space], "objects keep their namespace");
        must(spaces_[space].is_known || spaces_[space].references == 0, "what is used is known");
    }
    must(objects == objects_ && objects == table_.size() && bytes == object_bytes_, "objects are counted");
}

}  // namespace lmcache
