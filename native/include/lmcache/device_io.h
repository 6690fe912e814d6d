// Ranges of one open file or block device to and from memory: by threads that call preadv and pwritev, or by one thread
// that keeps an io_uring filled.
//
// Invariants:
// - The caller's memory is touched until the job is returned by drain(), and never afterwards.
// - Nothing is ordered between transfers under way: who needs an order waits for one before submitting the next.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lmcache/job_queue.h"
#include "lmcache/transfer_loop.h"

namespace lmcache {

struct DeviceIOOptions {
    int fd = -1;                  // stays the caller's, who closes it after this object
    unsigned threads = 4;         // their number is the depth, unless `queue_depth` says otherwise
    unsigned queue_depth = 0;     // above 0: io_uring with at most that many transfers under way
    std::size_t align_bytes = 1;  // of addresses, lengths and offsets, where the file was opened with O_DIRECT
    bool copy_always = false;     // every transfer through memory of its own, as unaligned ones
};

struct Transfer {
    std::uint64_t offset = 0;  // a multiple of align_bytes
    std::uint64_t address = 0;
    std::uint64_t size = 0;
    std::uint64_t head = 0;  // writes: 4096 bytes that go in place of the first 4096 at `address`; 0: none
};

enum class DeviceAct : std::uint8_t { kWrite, kRead, kSync };

struct DeviceJob : Job<IoResults> {
    DeviceAct act = DeviceAct::kRead;
    std::vector<Transfer> transfers;
};

// All methods are thread-safe. Submitting after close(), or more than kMaxJobTransfers at once, throws
// std::invalid_argument.
class DeviceIO {
public:
    static constexpr unsigned kMaxThreads = 1024;
    static constexpr unsigned kMaxQueueDepth = 4096;
    static constexpr std::size_t kMaxJobTransfers = 65536;
    using Completion = JobQueue<DeviceJob>::Completion;

    // std::system_error where io_uring is refused.
    explicit DeviceIO(const DeviceIOOptions& options);

    // Readable when drain() has something.
    int event_fd() const { return queue_.event_fd(); }

    // Each gives the number of a job, whose results are bytes moved. A read ends early at the end of the file; a write
    // is complete or failed. A write that is not aligned is completed with zero bytes up to the alignment.
    std::uint64_t submit_write(std::vector<Transfer> transfers);
    std::uint64_t submit_read(std::vector<Transfer> transfers);
    // fdatasync: everything whose job was returned before is on the medium when this one is.
    std::uint64_t submit_sync();

    std::vector<Completion> drain() { return queue_.drain(); }

    // Transfers that went through memory of their own.
    std::uint64_t copied() const { return copied_; }

    // Waits for everything submitted, then stops the threads. Results stay available to drain(). Idempotent.
    void close() { queue_.close(); }

private:
    class Step;
    struct StepSource;

    std::uint64_t submit(DeviceAct act, std::vector<Transfer> transfers);
    void work();

    const DeviceIOOptions options_;
    std::atomic<std::uint64_t> copied_{0};
    JobQueue<DeviceJob> queue_;
};

}  // namespace lmcache
