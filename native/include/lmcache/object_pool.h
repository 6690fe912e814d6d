// The objects' records, one cache line each, named by small integers. Records never move and memory grows in blocks, so
// that no call pays for copying a large table. Not thread-safe.
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
};

inline constexpr std::uint32_t kNoObject = ~std::uint32_t{0};

struct alignas(64) Object {
    std::array<std::uint8_t, kChunkHashBytes> hash;
    std::uint32_t name_space;
    std::uint32_t first_unit;
    std::uint32_t units;
    std::uint32_t newer;  // links of its eviction queue while resident; `older` links the unused records
    std::uint32_t older;
    std::uint32_t readers;   // leases that hold it
    std::uint32_t last_use;  // position in the order of all uses; wraps around
    ObjectState state;
    std::uint8_t cycle;  // of keeping limits, in which it became resident; wraps around
    bool temporary : 1;  // gone with its last lease
    bool linked : 1;     // in its eviction queue
    bool in_main : 1;    // S3FIFO: which queue that is
    bool sampled : 1;    // its ages are measured
};
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
