// Encodes and decodes batches of frames on threads of its own, of low priority.
//
// Invariant: the caller's memory is touched until the job is returned by drain(), and never afterwards.
#pragma once

#include <memory>
#include <vector>

#include "lmcache/job_queue.h"
#include "lmcache/serde_chain.h"

namespace lmcache {

struct SerdeResults {
    std::vector<std::uint64_t> frame_bytes;  // 0 where it failed
    std::vector<std::uint8_t> faults;        // SerdeFault
};

// One frame each: element i is `sources[i]` -> `destinations[i]`, of the namespace templates[positions[i]].
struct SerdeJob : Job<SerdeResults> {
    bool encodes = false;
    std::vector<std::uint64_t> sources, source_bytes, destinations, destination_bytes;
    std::vector<std::byte> chunk_hashes;  // 32 bytes each
    std::vector<SerdeTemplates> templates;
    std::vector<std::uint32_t> positions;
};

// Thread-safe.
class SerdeQueue {
public:
    static constexpr std::size_t kMaxThreads = 64;
    using Completion = JobQueue<SerdeJob>::Completion;

    // Throws std::invalid_argument and std::system_error.
    SerdeQueue(std::shared_ptr<const SerdeChain> chain, std::size_t threads);

    // Readable when drain() has something.
    int event_fd() const { return queue_.event_fd(); }

    // Lists of different lengths, a position beyond the templates, or submitting after close() throws
    // std::invalid_argument.
    std::uint64_t submit(std::shared_ptr<SerdeJob> job);

    std::vector<Completion> drain() { return queue_.drain(); }

    // Waits for everything submitted, then stops the threads. Results stay available to drain(). Idempotent.
    void close() { queue_.close(); }

private:
    void work() noexcept;
    SerdeResult run(const SerdeJob& job, std::size_t element) const noexcept;

    const std::shared_ptr<const SerdeChain> chain_;
    JobQueue<SerdeJob> queue_;
};

}  // namespace lmcache
