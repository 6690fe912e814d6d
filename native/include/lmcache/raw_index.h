// The index of a raw device (docs/formats/raw_block.md): the table as on the device, a hash table of its keys, and the
// free slots. Calls take whole batches. The caller makes the transfers, and keeps their order.
//
// Invariants:
// - Every slot is free, being written by one store, claimed by one object, awaited (its object is removed; a load still
//   reads it, or the table on the device may still claim it), or being erased.
// - An unclaimed slot that may still have the header of a previous object keeps a generation in its entry.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "lmcache/bit_set.h"
#include "lmcache/device_io.h"
#include "lmcache/key_table.h"
#include "lmcache/slot_header.h"

namespace lmcache {

struct RawIndexOptions {
    std::uint32_t slots = 0;
    std::uint64_t slot_bytes = 0;
    std::uint64_t frame_limit_bytes = 0;  // of an object
    std::uint64_t first_slot_offset = 0;
    std::size_t page_bytes = 0;  // of the table
    std::uint64_t first_generation = 0;
    std::uint8_t device[kDeviceIdBytes]{};
};

// The entry of one slot, as on the device. units 0: free.
struct RawEntry {
    std::uint8_t hash[kChunkHashBytes];
    std::uint32_t number;  // of the namespace
    std::uint32_t units;
    std::uint64_t generation;
    std::uint64_t used_at;  // microseconds since 1970
};
static_assert(sizeof(RawEntry) == 56);

// The keys of a batch: namespaces by the ids that intern() gave, and 32 bytes of hash each.
struct RawKeys {
    std::span<const std::uint32_t> spaces;
    const std::byte* hashes = nullptr;

    std::size_t size() const { return spaces.size(); }
    std::span<const std::byte, kChunkHashBytes> hash(std::size_t i) const {
        return std::span<const std::byte, kChunkHashBytes>(hashes + i * kChunkHashBytes, kChunkHashBytes);
    }
};

// The values are part of the Python interface.
enum class StoreCode : std::uint8_t { kFailed, kStored, kAlreadyThere, kTooLarge, kFull };
enum class LoadCode : std::uint8_t { kMissing, kLoaded, kCorrupt, kFailed };

// A batch under way: the transfers for DeviceIO, and what end_store or end_load needs after them.
struct RawBatch {
    struct Element {
        std::uint32_t position;  // of the key in the batch
        std::uint32_t space;
        std::uint32_t slot;
        std::uint64_t generation;
        std::array<std::byte, kChunkHashBytes> hash;
    };

    std::vector<std::uint8_t> codes;  // one a key
    std::vector<Transfer> transfers;
    std::vector<Element> elements;  // one a transfer

    template <typename Code>
    void set_code(const Element& element, Code code) {
        codes[element.position] = static_cast<std::uint8_t>(code);
    }
};

// Not thread-safe. Throws std::invalid_argument for slots, namespaces and pages that do not exist, and for lists of
// different lengths.
class RawIndex {
public:
    static constexpr std::uint32_t kUnnamed = ~std::uint32_t{0};
    static constexpr std::uint64_t kUnitBytes = 4096;
    static constexpr std::size_t kPageHeaderBytes = 64;

    explicit RawIndex(const RawIndexOptions& options);

    // ---- namespaces -------------------------------------------------------------------------------------------------
    // A new id. `number`: its page on the device, or kUnnamed.
    std::uint32_t intern(std::span<const std::byte, kDigestBytes> digest, std::uint32_t number);
    void set_number(std::uint32_t space, std::uint32_t number) { spaces_.at(space).number = number; }
    // Ids of namespaces with neither objects nor transfers under way. From now on intern() may give them to others.
    std::vector<std::uint32_t> take_unused_spaces();

    // ---- recovery ---------------------------------------------------------------------------------------------------
    // In this order: load_pages for all pages, add for the headers of slots_to_scan, finish_recovery.
    // Pages of the table from `first` on. `spaces`: ids by namespace number, kUnnamed for unknown ones. `forget`: takes
    // over generations only, no objects.
    void load_pages(std::uint32_t first, std::span<const std::byte> pages, std::span<const std::uint32_t> spaces,
                    bool forget);
    // Slots that no valid entry describes; their headers have to be read.
    const std::vector<std::uint32_t>& slots_to_scan() const { return slots_to_scan_; }
    // The content of a slot header. Of two slots with one key the higher generation counts.
    void add(std::uint32_t slot, std::uint32_t space, std::span<const std::byte, kChunkHashBytes> hash,
             std::uint64_t size_bytes, std::uint64_t generation);
    // `gap`: how many generations may have been used without a trace on the device.
    void finish_recovery(std::uint64_t gap);
    // The claimed slots, last used first.
    std::vector<std::uint32_t> youngest_first() const;

    // ---- storing ----------------------------------------------------------------------------------------------------
    // Assigns slots and generations to keys that are not stored yet, and seals their headers (4096 bytes a key at
    // `heads`). The codes of keys without a transfer are final.
    RawBatch begin_store(const RawKeys& keys, std::span<const std::uint64_t> addresses,
                         std::span<const std::uint64_t> sizes, std::byte* heads);
    // Enters the objects that were written and sets the codes. Returns the pages of the table that must be written now,
    // one after the other. `now` in microseconds since 1970.
    std::vector<std::uint32_t> end_store(RawBatch& batch, std::span<const std::int32_t> errors, std::uint64_t now);

    // ---- loading ----------------------------------------------------------------------------------------------------
    // Keeps the slots of the keys found until end_load. Reads at most the size of a buffer into it.
    RawBatch begin_load(const RawKeys& keys, std::span<const std::uint64_t> addresses,
                        std::span<const std::uint64_t> sizes);
    // Turns slots into frames, sets the codes and releases the slots. Returns the positions of keys that are corrupt
    // and still in the slot that was read.
    std::vector<std::uint32_t> end_load(RawBatch& batch, std::span<const std::int64_t> results,
                                        std::span<const std::int32_t> errors, std::uint64_t now);

    // ---- looking ----------------------------------------------------------------------------------------------------
    // Bytes of each object, 0 where there is none.
    std::vector<std::uint64_t> sizes_of(const RawKeys& keys) const;
    std::size_t objects() const { return objects_; }
    std::uint64_t object_bytes() const { return object_bytes_; }
    std::size_t free_slots() const { return free_.size() + suspects_.size(); }
    std::uint64_t next_generation() const { return next_generation_; }
    // At most `count` claimed slots from `first` on.
    std::vector<std::uint32_t> claimed_from(std::uint32_t first, std::size_t count) const;
    const RawEntry& entry(std::uint32_t slot) const { return entries_[check_slot(slot)]; }
    std::uint32_t space_of(std::uint32_t slot) const { return spaces_of_slots_[check_slot(slot)]; }
    std::uint64_t offset_of(std::uint32_t slot) const {
        return options_.first_slot_offset + slot * options_.slot_bytes;
    }
    // Those of the slots that still hold the object of that generation and whose headers (4096 bytes each, as far as
    // they could be read) are of another one.
    std::vector<std::uint32_t> misplaced(std::span<const std::uint32_t> slots,
                                         std::span<const std::uint64_t> generations, const std::byte* headers,
                                         std::span<const std::int64_t> results,
                                         std::span<const std::int32_t> errors) const;

    // ---- removing ---------------------------------------------------------------------------------------------------
    // Returns their slots, to be passed to release_slots() once their pages are written. Ignores unknown keys.
    std::vector<std::uint32_t> remove(const RawKeys& keys);
    // The same for every object, and for stores under way: they end as failed.
    std::vector<std::uint32_t> remove_all();
    void release_slots(std::span<const std::uint32_t> slots);
    // At most `count` free slots from `first` on that may still have the header of a previous object. They are not
    // given out until end_erase().
    std::vector<std::uint32_t> take_stale(std::uint32_t first, std::size_t count);
    void end_erase(std::span<const std::uint32_t> slots, std::span<const std::int32_t> errors);

    // ---- pages ------------------------------------------------------------------------------------------------------
    std::vector<std::uint32_t> pages_of(std::span<const std::uint32_t> slots) const;  // ascending, each once
    // Pages that are newer here than on the device, and may wait.
    std::vector<std::uint32_t> dirty_pages() const;
    // A page as it is to be written now.
    void page_image(std::uint32_t page, std::byte* image);
    std::size_t page_bytes() const { return options_.page_bytes; }

    // Throws std::runtime_error that names the broken invariant. O(slots).
    void check() const;

private:
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    template <typename T>
    using Zeroed = std::unique_ptr<T[], Free>;  // pages that were never written to take no memory

    struct Space {
        std::array<std::byte, kDigestBytes> digest;
        std::uint32_t number;
        std::uint32_t references;  // of claimed slots and of transfers under way
        bool is_idle;              // it is in idle_spaces_
        bool is_known;             // by the caller
    };

    std::uint32_t check_slot(std::uint32_t slot) const;
    void retain(std::uint32_t space) { ++spaces_[space].references; }
    void release(std::uint32_t space);
    void enter(RawBatch& batch, const RawKeys& keys, std::size_t position, std::uint32_t slot, std::uint64_t generation,
               const Transfer& transfer);
    std::uint64_t hash_of(std::uint32_t slot) const;
    std::uint32_t find(std::uint32_t space, std::span<const std::byte, kChunkHashBytes> hash) const;
    void claim(std::uint32_t slot, std::uint32_t space, const RawEntry& entry);
    void unclaim(std::uint32_t slot);
    void recover(std::uint32_t slot, std::uint32_t space, const RawEntry& found);
    bool verifies(std::uint32_t page, std::span<const std::byte> content);
    std::uint32_t take_slot();
    void put_back(std::uint32_t slot, bool suspect);
    bool header_fits(std::uint32_t slot, const std::byte* header) const;
    std::uint64_t use_time(std::uint64_t now, std::size_t count);
    SlotPlace place(std::uint32_t slot, std::uint64_t generation) const;
    std::uint32_t page_of(std::uint32_t slot) const { return slot / entries_per_page_; }
    bool claims(std::uint32_t slot, std::uint64_t generation) const {
        return entries_[slot].units != 0 && entries_[slot].generation == generation;
    }

    const RawIndexOptions options_;
    const std::uint32_t entries_per_page_;
    const std::uint32_t pages_;
    Zeroed<RawEntry> entries_;
    Zeroed<std::uint32_t> spaces_of_slots_;  // of claimed slots
    KeyTable table_;                         // of claimed slots
    std::size_t objects_ = 0;
    std::uint64_t object_bytes_ = 0;
    std::vector<Space> spaces_;  // by id
    std::vector<std::uint32_t> idle_spaces_;
    std::vector<std::uint32_t> unused_spaces_;

    BitSet free_;
    std::vector<std::uint32_t> suspects_;  // free, but their last write failed: used last
    BitSet stale_;                         // of free_: those that keep a generation
    std::unordered_map<std::uint32_t, std::uint32_t> readers_;
    BitSet awaited_;  // free as soon as nobody reads them
    BitSet dirty_;    // pages

    std::vector<std::uint32_t> slots_to_scan_;
    std::vector<std::byte> scratch_;  // a page
    std::uint64_t next_generation_;
    std::uint64_t first_generation_;
    std::uint64_t last_used_ = 0;
};

}  // namespace lmcache
