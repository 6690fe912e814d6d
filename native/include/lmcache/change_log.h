// The order in which objects became resident and left, for readers that follow an index from outside.
//
// A ring of the latest kMaxChangesKept changes, numbered from 0 on; nothing is kept, and nothing is noted, while nobody
// watches. A reader has a cursor, the number of the first change that it has not seen. One whose cursor is older than
// the ring, or from before a time in which nobody watched, is told that it lost changes: it takes a new cursor and then
// lists what is there. A listing that begins after the cursor was taken misses nothing, because whatever changes
// meanwhile is among the changes as well.
//
// Not thread-safe: the index that owns it calls it under its own mutex.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lmcache/limits.h"
#include "lmcache/namespaces.h"

namespace lmcache {

struct Change {
    Digest name_space;
    std::array<std::uint8_t, kChunkHashBytes> hash;
    std::uint64_t size_and_added;  // the highest bit: 1 it became resident, 0 it left

    static constexpr std::uint64_t kAdded = std::uint64_t{1} << 63;
    std::uint64_t size_bytes() const { return size_and_added & ~kAdded; }
    bool added() const { return (size_and_added & kAdded) != 0; }
};
static_assert(sizeof(Change) == 72);

// The changes of one read, oldest first.
struct ChangeBatch {
    std::vector<Change> changes;
    std::uint64_t next_cursor = 0;
    bool lost = false;  // changes between the cursor and these are unknown; `changes` is empty then
};

class ChangeLog {
public:
    // A reader more, or one less. With the last one the memory goes, and every cursor is void.
    void watch() { ++readers_; }
    // std::invalid_argument where nobody watches.
    void unwatch();
    bool watched() const { return readers_ != 0; }

    void add(const Digest& name_space, const std::array<std::uint8_t, kChunkHashBytes>& hash, std::uint64_t size_bytes,
             bool added) {
        if (free_ == block_end_) begin_block();
        *free_++ = {name_space, hash, size_bytes | (added ? Change::kAdded : 0)};
        ++next_;
    }

    // The number that the next change gets: the cursor of a reader that begins now.
    std::uint64_t next() const { return next_; }
    // At most `most` changes from `cursor` on. A cursor that was never given out counts as one that is too old.
    ChangeBatch read(std::uint64_t cursor, std::size_t most) const;

    std::size_t memory_bytes() const;

private:
    // Memory grows by blocks, so that no change pays for copying others.
    static constexpr std::uint64_t kBlockChanges = 4096;
    static constexpr std::uint64_t kBlocks = kMaxChangesKept / kBlockChanges;
    static_assert(kMaxChangesKept % kBlockChanges == 0);

    void begin_block();
    std::uint64_t first() const { return next_ - start_ > kMaxChangesKept ? next_ - kMaxChangesKept : start_; }

    std::vector<std::unique_ptr<Change[]>> blocks_;  // change n is in block n / kBlockChanges % kBlocks
    Change* free_ = nullptr;                         // where the next one goes
    Change* block_end_ = nullptr;
    std::uint64_t start_ = 0;  // the first since somebody watches; begins a block
    std::uint64_t next_ = 0;
    std::size_t readers_ = 0;
};

// Reads at most `most` changes in steps, between which the lock that `read(cursor, most)` takes is free.
template <typename Read>
ChangeBatch read_in_steps(std::uint64_t cursor, std::size_t most, Read&& read) {
    constexpr std::size_t kStepChanges = 4096;
    ChangeBatch all = read(cursor, std::min(most, kStepChanges));
    while (!all.changes.empty() && all.changes.size() < most) {
        const ChangeBatch step = read(all.next_cursor, std::min(most - all.changes.size(), kStepChanges));
        if (step.changes.empty()) break;  // that is all, or the next call says what is lost
        all.changes.insert(all.changes.end(), step.changes.begin(), step.changes.end());
        all.next_cursor = step.next_cursor;
    }
    return all;
}

// Changes as columns of one length.
struct ChangePage {
    std::vector<Digest> namespaces;
    std::vector<std::uint32_t> positions;  // of each change's namespace in `namespaces`
    std::vector<std::uint8_t> hashes;
    std::vector<std::uint64_t> sizes_bytes;
    std::vector<std::uint8_t> added;  // 1: it became resident, 0: it left
    std::uint64_t next_cursor = 0;
    bool lost = false;
};

ChangePage page_of(const ChangeBatch& batch);

// What comes of a page in one of its namespaces, kChunkHashBytes an object.
struct ObjectStates {
    std::vector<std::uint8_t> gone, there;
    std::vector<std::uint64_t> sizes_bytes;  // of those that are there
};

// One for each namespace of the page. Of an object that changes several times the last state counts.
std::vector<ObjectStates> last_states(const ChangePage& page);

// The chunks that a page changes in some namespaces, each once, in the order of their first change.
struct ChangedChunks {
    std::vector<std::uint32_t> sets;   // which set of namespaces each is of
    std::vector<std::uint8_t> hashes;  // kChunkHashBytes each
};

// `namespaces` are distinct, in sets of `width`: one set for each salt, say, of all ranks and groups.
// std::invalid_argument where `width` does not divide them.
ChangedChunks changed_chunks(const ChangePage& page, std::span<const Digest> namespaces, std::size_t width);

}  // namespace lmcache
