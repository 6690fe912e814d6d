// Moves chunks between paged KV tensors and arena slots on its own threads. Thread-safe.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lmcache/block_mover.h"
#include "lmcache/frame.h"
#include "lmcache/paged_group.h"

namespace lmcache {

// What became of a chunk. The numbers are part of the Python interface.
enum ChunkResult : std::uint8_t {
    kUnreadable = 0,  // a load's frame is not what its key says; a store that was not made
    kCopied = 1,      // and, for a load, verified
    kNotMoved = 2,    // a load's blocks were not written: nothing is known of its frame
};

class PagedCopier {
public:
    using JobId = std::uint64_t;
    using Results = std::vector<std::uint8_t>;  // a ChunkResult for each chunk

    // The arena is memory that this copier may read and write while it lives. Throws std::invalid_argument for a thread
    // count out of range, std::system_error when the machine refuses a thread or an eventfd.
    PagedCopier(std::uintptr_t arena_address, std::size_t arena_bytes, std::size_t threads,
                std::unique_ptr<BlockMover> mover = std::make_unique<HostMover>());
    PagedCopier(const PagedCopier&) = delete;
    PagedCopier& operator=(const PagedCopier&) = delete;
    ~PagedCopier();

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
    std::optional<Results> wait(JobId job, double timeout_seconds);
    std::vector<std::pair<JobId, Results>> poll();
    int event_fd() const { return event_fd_; }  // readable exactly while poll() has something
    bool idle() const;

    // Finishes every submitted job, then stops the threads. Results stay available. Later submits throw.
    void close();

private:
    struct Job {
        JobId id;
        std::shared_ptr<const PagedGroup> group;
        bool is_store;
        StoreKind store_kind;
        std::vector<std::uint64_t> slots;
        std::vector<std::int64_t> blocks;
        std::vector<std::byte> hashes;
        FrameHeader frame_template;                            // stores
        std::array<std::byte, kDigestBytes> namespace_digest;  // loads
        std::shared_ptr<const CudaFence> fence;                // loads
        std::size_t chunks_per_piece;
        Results results;                  // each element written by one thread, read after the job has finished
        std::list<JobId>::iterator node;  // in running_ or finished_; under mutex_
        std::size_t next = 0;             // first chunk that no thread has taken; under mutex_
        std::size_t left = 0;             // chunks not yet finished; under mutex_
    };

    std::shared_ptr<const PagedGroup> group_at(std::size_t group) const;
    std::shared_ptr<Job> make_job(std::size_t group, bool is_store, std::span<const std::uint64_t> slots,
                                  std::span<const std::int64_t> blocks, std::span<const std::byte> hashes) const;
    JobId start(std::shared_ptr<Job> job);
    void work() noexcept;
    ChunkResult store_chunk(const Job& job, std::size_t chunk) const noexcept;
    ChunkResult load_chunk(const Job& job, std::size_t chunk) const noexcept;
    void finish(const Job& job) noexcept;  // mutex_ held
    void settle_event_fd() noexcept;       // mutex_ held

    std::byte* const arena_;
    const std::size_t arena_bytes_;
    const std::unique_ptr<BlockMover> mover_;
    int event_fd_ = -1;
    std::vector<std::thread> threads_;

    mutable std::mutex mutex_;
    std::condition_variable work_ready_;
    std::condition_variable job_finished_;
    std::vector<std::shared_ptr<const PagedGroup>> groups_;
    std::deque<std::shared_ptr<Job>> queue_;                // jobs with chunks that no thread has taken, loads first
    std::unordered_map<JobId, std::shared_ptr<Job>> jobs_;  // running, or finished and not yet reported
    // Every job of jobs_ is in one of these. A job that finishes moves its node, which cannot fail.
    std::list<JobId> running_;
    std::list<JobId> finished_;  // in the order they finished
    JobId next_job_ = 1;
    bool closing_ = false;
};

}  // namespace lmcache
