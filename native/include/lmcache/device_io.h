// Ranges of one open file or block device to and from memory: by threads that call preadv and pwritev, or by one thread
// that keeps an io_uring filled.
//
// Invariants:
// - The caller's memory is touched until the batch is returned by drain(), and never afterwards.
// - Nothing is ordered between transfers under way: who needs an order waits for one before submitting the next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "lmcache/file_io.h"

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

// All methods are thread-safe. Submitting after close(), or more than kMaxBatch at once, throws std::invalid_argument.
class DeviceIO {
public:
    static constexpr unsigned kMaxThreads = FileIO::kMaxThreads;
    static constexpr unsigned kMaxQueueDepth = 4096;
    static constexpr std::size_t kMaxBatch = 65536;

    // std::system_error where io_uring is refused.
    explicit DeviceIO(const DeviceIOOptions& options);
    DeviceIO(const DeviceIO&) = delete;
    DeviceIO& operator=(const DeviceIO&) = delete;
    ~DeviceIO();

    // Readable when drain() has something.
    int event_fd() const;

    // Results are bytes moved. A read ends early at the end of the file; a write is complete or failed. A write that is
    // not aligned is completed with zero bytes up to the alignment.
    std::uint64_t submit_write(std::vector<Transfer> transfers);
    std::uint64_t submit_read(std::vector<Transfer> transfers);
    // fdatasync: everything whose batch was returned before is on the medium when this one is.
    std::uint64_t submit_sync();

    std::vector<FinishedBatch> drain();

    // Transfers that went through memory of their own.
    std::uint64_t copied() const;

    // Waits for everything submitted, then stops the threads. Results stay available to drain(). Idempotent.
    void close();

private:
    class State;
    std::unique_ptr<State> state_;
};

}  // namespace lmcache
