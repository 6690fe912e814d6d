// Copies between ordinary memory and storage that is mapped into it (DAX), on threads of its own.
//
// Invariants:
// - The record of an element is written after all its bytes, and after the records of the elements before it in the
//   job: when the process dies, the records that are there are a prefix of the job, each with all of its bytes.
// - The caller's memory is touched until the job is returned by drain(), and never afterwards.
// - A page that the medium cannot give (SIGBUS) fails an element, not the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lmcache/job_queue.h"

namespace lmcache {

struct MappedCopierOptions {
    std::byte* mapping = nullptr;
    std::size_t mapping_bytes = 0;
    unsigned threads = 1;
    bool flush = false;  // processor caches are written back before a record counts: for persistent memory
};

struct MappedJob : Job<std::vector<std::uint8_t>> {
    bool is_write = false;
    std::vector<std::uint64_t> destinations, sources, sizes, record_places;
    std::vector<std::byte> records;
    std::size_t record_bytes = 0;
};

// All methods are thread-safe. Jobs that run at once must not overlap, but for records where either may win. Submitting
// after close(), lists of different lengths, or an element that is not wholly in the mapping throws
// std::invalid_argument.
class MappedCopier {
public:
    static constexpr unsigned kMaxThreads = 1024;
    using Results = MappedJob::Results;  // 1: the element was copied
    using Completion = JobQueue<MappedJob>::Completion;

    explicit MappedCopier(const MappedCopierOptions& options);

    // Readable when drain() has something.
    int event_fd() const { return queue_.event_fd(); }

    // Out of the mapping. The elements of a job are shared out among the threads.
    std::uint64_t submit_read(std::vector<std::uint64_t> destinations, std::vector<std::uint64_t> sources,
                              std::vector<std::uint64_t> sizes);

    // Into the mapping, one thread a job, in order; after each element its record, record_bytes of `records`, is
    // written to its place. An element of size 0 is its record alone. After a failed element the rest is left out.
    std::uint64_t submit_write(std::vector<std::uint64_t> destinations, std::vector<std::uint64_t> sources,
                               std::vector<std::uint64_t> sizes, std::vector<std::uint64_t> record_places,
                               std::vector<std::byte> records, std::size_t record_bytes);

    std::vector<Completion> drain() { return queue_.drain(); }

    // Waits for everything submitted, then stops the threads. Results stay available to drain(). Idempotent.
    void close() { queue_.close(); }

private:
    void check_inside(std::uint64_t address, std::uint64_t size, const char* what) const;
    void work() noexcept;
    void read(MappedJob& job, std::size_t begin, std::size_t end) const noexcept;
    void write(MappedJob& job) const noexcept;

    const MappedCopierOptions options_;
    JobQueue<MappedJob> queue_;
};

}  // namespace lmcache
