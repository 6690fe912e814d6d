// One file on its way to or from memory.
#pragma once

#include <sys/stat.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "lmcache/file_job.h"
#include "lmcache/io_uring.h"
#include "lmcache/transfer_loop.h"
#include "lmcache/unique_fd.h"

namespace lmcache {

struct FileIOOptions {
    unsigned threads = 4;
    bool use_odirect = false;
    std::size_t block_bytes = 4096;    // O_DIRECT wants addresses and lengths that are multiples of it
    std::size_t read_ahead_bytes = 0;  // size of the first read of a file, 0: all at once
    unsigned queue_depth = 0;          // above 0: transfers by io_uring, at most that many at once; threads do the rest
};

// What the transfers of one FileIO share. Outlives them.
struct FileTransferContext {
    const FileIOOptions options;
    std::atomic<std::uint64_t> buffered_fallbacks{0};
};

// A Step of transfer_loop.h. A file that is written is under its temporary name at the end; one that failed is gone.
class FileTransfer {
public:
    FileTransfer() = default;
    FileTransfer(FileTransferContext& context, std::shared_ptr<FileJob> job, std::size_t index)
        : context_(&context), job_(std::move(job)), index_(index) {}

    const std::shared_ptr<FileJob>& job() const { return job_; }
    std::size_t index() const { return index_; }

    std::optional<IoOutcome> begin();
    std::int64_t move() const;
    void start(IoUring& ring, std::uint64_t tag) const;
    std::optional<IoOutcome> absorb(std::int64_t moved);

private:
    const FileIOOptions& options() const { return context_->options; }
    bool is_aligned(std::uint64_t value) const { return (value & (options().block_bytes - 1)) == 0; }
    int open(const std::string& path, int flags, mode_t mode);
    int open_new();
    int open_existing();
    bool leave_direct();
    std::optional<IoOutcome> plan_part();
    bool copy_mapped() const;
    bool is_frame(std::uint64_t size_bytes) const;
    IoOutcome finish_write(IoOutcome outcome);
    IoOutcome finish_read(IoOutcome outcome);
    IoOutcome finish(IoOutcome outcome) { return job_->writes() ? finish_write(outcome) : finish_read(outcome); }

    FileTransferContext* context_ = nullptr;
    std::shared_ptr<FileJob> job_;
    std::size_t index_ = 0;
    UniqueFd file_;
    bool is_direct_ = false;
    std::uint64_t done_bytes_ = 0, size_bytes_ = 0;
    iovec part_{};  // what is asked for next
};

}  // namespace lmcache
