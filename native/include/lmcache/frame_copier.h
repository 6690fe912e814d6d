// Frames out of memory that another server has mapped, on threads of its own.
//
// Invariants:
// - The mapping may change or be cut off meanwhile: what counts as copied is a whole frame of its key.
// - Mapping and targets are touched until the job is returned by drain(), and never afterwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "lmcache/frame_stream.h"
#include "lmcache/job_queue.h"

namespace lmcache {

// What is copied, element for element as of FrameBatch; `sources` are offsets in the mapping.
struct FrameCopyJob : Job<std::vector<std::uint8_t>> {
    std::vector<std::uint64_t> addresses, sizes, sources;
    std::vector<std::byte> namespace_digests, chunk_hashes;
    const std::byte* mapping = nullptr;
    std::size_t mapping_bytes = 0;

    FrameBatch batch() const { return {addresses, sizes, namespace_digests, chunk_hashes}; }
};

// All methods are thread-safe.
class FrameCopier {
public:
    static constexpr unsigned kMaxThreads = 1024;
    using Results = FrameCopyJob::Results;  // 1: the frame was copied and is its key's
    using Completion = JobQueue<FrameCopyJob>::Completion;

    // Throws std::invalid_argument, std::system_error.
    explicit FrameCopier(unsigned threads);

    // Readable when drain() has something.
    int event_fd() const { return queue_.event_fd(); }

    // The frames of a job are shared out among the threads, which take them from one mapping after the other. A frame
    // that is not all inside the mapping is not copied. Throws std::invalid_argument after close(), and for arrays that
    // do not fit each other.
    std::uint64_t submit(std::shared_ptr<FrameCopyJob> job);

    std::vector<Completion> drain() { return queue_.drain(); }

    // Waits for everything submitted, then stops the threads. Results stay available to drain(). Idempotent.
    void close() { queue_.close(); }

private:
    void work() noexcept;

    JobQueue<FrameCopyJob> queue_;
};

}  // namespace lmcache
