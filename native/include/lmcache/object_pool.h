// The records of L1's objects and of those in the ledgers of L2, one cache line each, named by small integers. Records
// never move and memory grows in blocks, so that no call pays for copying a large table. Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "lmcache/limits.h"

namespace lmcache {

enum class ObjectState : std::uint8_t {
    kUnused,
    kStaged,       // in the key table, being written, invisible to readers
    kResident,     // in the key table, readable
    kDetached,     // cleared while leased: no longer in the key table, gone with its last lease
    kQuarantined,  // reservation expired: not in the key table, its writer may still write
    kLeaving,      // chosen to go, in the key table until that is confirmed
};

inline constexpr std::uint32_t kNoObject = ~std::uint32_t{0};

struct alignas(64) Object {
    std::array<std::uint8_t, kChunkHashBytes> hash;
    std::uint32_t name_space;
    std::uint32_t first_unit;  // where it is in the arena; L1 only
    std::uint32_t units;       // what it takes; the low half of `charge`
    std::uint32_t newer;       // links of its eviction queue while resident; `older` links the unused records
    std::uint32_t older;
    std::uint32_t readers : 24;  // leases, or loads under way, that hold it
    std::uint32_t units_high : 8;
    std::uint32_t last_use_low;
    std::uint16_t last_use_high;
    std::uint8_t cycle;     // L1: of keeping limits, in which it became resident; ledger: of scans, that last saw it
    ObjectState state : 3;  // the rest of this byte: flags
    bool temporary : 1;     // gone with its last lease
    bool linked : 1;        // in its eviction queue
    bool in_main : 1;       // S3FIFO: which queue that is
    bool sampled : 1;       // its ages are measured

    // What it takes: units of the arena in L1, bytes in a ledger.
    std::uint64_t charge() const { return std::uint64_t{units_high} << 32 | units; }
    void set_charge(std::uint64_t charge) {
        units = static_cast<std::uint32_t>(charge);
        units_high = static_cast<std::uint8_t>(charge >> 32);
    }
    // Its position in the order of all uses.
    std::uint64_t last_use() const { return std::uint64_t{last_use_high} << 32 | last_use_low; }
    void set_last_use(std::uint64_t use) {
        last_use_low = static_cast<std::uint32_t>(use);
        last_use_high = static_cast<std::uint16_t>(use >> 32);
    }
};
inline constexpr std::uint64_t kMaxCharge = (std::uint64_t{1} << 40) - 1;
static_assert(sizeof(Object) == 64);

class ObjectPool {
public:
    Object& operator[](std::uint32_t index) { return blocks_[index / kBlockObjects][index % kBlockObjects]; }
    const Object& operator[](std::uint32_t index) const {
        return blocks_[index / kBlockObjects][index % kBlockObjects];
    }
    void prefetch(std::uint32_t index) const { __builtin_prefetch(&(*this)[index], 1); }

    // A record with readers = 0, temporary = false, and state, place and key for the caller to fill in.
    std::uint32_t take();
    void give_back(std::uint32_t index);

    // Records ever taken: valid indexes are below.
    std::uint32_t size() const { return size_; }
    std::size_t memory_bytes() const;

private:
    // 2 MiB, so that a block can be one huge page: with small pages, address translation would cost a large pool more
    // than the records do.
    static constexpr std::uint32_t kBlockObjects = 32768;

    struct Free {
        void operator()(Object* block) const { std::free(block); }
    };

    void add_block();

    std::vector<std::unique_ptr<Object[], Free>> blocks_;
    std::uint32_t size_ = 0;
    std::uint32_t unused_ = kNoObject;
};

}  // namespace lmcache
