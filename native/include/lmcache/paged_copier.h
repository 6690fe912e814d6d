// Moves chunks between paged KV tensors and arena slots on its own threads. Thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "lmcache/block_mover.h"
#include "lmcache/frame.h"
#include "lmcache/job_queue.h"
#include "lmcache/paged_group.h"

namespace lmcache {

// What became of a chunk. The numbers are part of the Python interface.
enum ChunkResult : std::uint8_t {
    kUnreadable = 0,  // a load's frame is not what its key says; a store that was not made
    kCopied = 1,      // and, for a load, verified
    kNotMoved = 2,    // a load's blocks were not written: nothing is known of its frame
};

struct CopyJob : Job<std::vector<std::uint8_t>> {
    std::shared_ptr<const PagedGroup> group;
    bool is_store;
    StoreKind store_kind;
    std::vector<std::uint64_t> slots;
    std::vector<std::int64_t> blocks;
    std::vector<std::byte> hashes;
    FrameHeader frame_template;                            // stores
    std::array<std::byte, kDigestBytes> namespace_digest;  // loads
    std::shared_ptr<const CudaFence> fence;                // loads
};

class PagedCopier {
public:
    using JobId = std::uint64_t;
    using Results = CopyJob::Results;  // a ChunkResult for each chunk

    // The arena is memory that this copier may read and write until it is destroyed. Throws std::invalid_argument for a
    // thread count out of range, std::system_error when the machine refuses a thread or an eventfd.
    PagedCopier(std::uintptr_t arena_address, std::size_t arena_bytes, std::size_t threads,
                std::unique_ptr<BlockMover> mover = std::make_unique<HostMover>());

    std::size_t add_group(std::vector<Segment> segments, std::size_t blocks_per_chunk, std::size_t num_blocks);
    std::size_t payload_bytes(std::size_t group) const;

    // A job of slots.size() chunks. `slots`: offsets in the arena, kNoSlot chunks are skipped (result 0). `blocks`:
    // blocks_per_chunk ids a chunk. `hashes`: 32 bytes a chunk. All arguments are copied. Throw std::invalid_argument
    // and start nothing when anything is out of range, so that the threads need no checks. Loads go before stores. A
    // store's KV must have been computed; a load writes no block before its fence has passed.
    JobId submit_store(std::size_t group, std::span<const std::uint64_t> slots, std::span<const std::int64_t> blocks,
                       std::span<const std::byte> hashes, std::span<const std::byte> template_bytes);
    JobId submit_load(std::size_t group, std::span<const std::uint64_t> slots, std::span<const std::int64_t> blocks,
                      std::span<const std::byte> hashes, std::span<const std::byte> namespace_digest,
                      std::shared_ptr<const CudaFence> fence = nullptr);

    // The results of a job, which is then forgotten, or nothing when it still runs after `timeout_seconds`. Throws
    // std::invalid_argument for a job that is unknown or forgotten.
    std::optional<Results> wait(JobId job, double timeout_seconds) { return queue_.wait(job, timeout_seconds); }

    // Finishes every submitted job, then stops the threads. Results stay available. Later submits throw.
    void close() { queue_.close(); }

private:
    std::shared_ptr<const PagedGroup> group_at(std::size_t group) const;
    std::shared_ptr<CopyJob> make_job(std::size_t group, bool is_store, std::span<const std::uint64_t> slots,
                                      std::span<const std::int64_t> blocks, std::span<const std::byte> hashes) const;
    void work() noexcept;
    ChunkResult store_chunk(const CopyJob& job, std::size_t chunk) const noexcept;
    ChunkResult load_chunk(const CopyJob& job, std::size_t chunk) const noexcept;

    std::byte* const arena_;
    const std::size_t arena_bytes_;
    const std::unique_ptr<BlockMover> mover_;
    mutable Mutex groups_mutex_;
    std::vector<std::shared_ptr<const PagedGroup>> groups_ LMCACHE_GUARDED_BY(groups_mutex_);
    JobQueue<CopyJob> queue_;
};

}  // namespace lmcache
