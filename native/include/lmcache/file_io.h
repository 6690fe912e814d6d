// Whole files to and from memory on native threads.
//
// Invariants:
// - A file appears under its final name only after every byte of it was written, by rename(2) from a temporary name.
// - Files written by one FileIO appear in the order of their submission: when the process dies at any moment, what is
//   there is a prefix of what was submitted, less the files that failed.
// - After the first failure in a job the rest of that job is not published (errno ECANCELED).
// - The caller's memory is touched until the job is returned by drain(), and never afterwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lmcache/file_job.h"
#include "lmcache/file_publisher.h"
#include "lmcache/file_transfer.h"
#include "lmcache/job_queue.h"

namespace lmcache {

// All methods are thread-safe. Submitting after close(), or lists of different lengths, throws std::invalid_argument.
// Each submission gives the number of a job; its results are, for each file, the bytes moved, the file's size (stat) or
// 0 (unlink, remove_empty).
class FileIO {
public:
    static constexpr unsigned kMaxThreads = 1024;
    static constexpr unsigned kMaxQueueDepth = 4096;
    static constexpr std::size_t kMaxJobFiles = 16384;
    using Completion = JobQueue<FileJob>::Completion;

    // std::system_error where io_uring is refused.
    explicit FileIO(const FileIOOptions& options);

    // Readable when drain() has something.
    int event_fd() const { return queue_.event_fd(); }

    // Writes memory to a new file at the temporary path, then renames. Missing parent folders are made, two levels
    // deep, and made again when another server removes them before the file is in them. The access time of file i of a
    // job is i microseconds before its submission: recency with suffixes first to go.
    std::uint64_t submit_write(std::vector<std::string> paths, std::vector<std::string> temporary_paths,
                               std::vector<std::uint64_t> addresses, std::vector<std::uint64_t> sizes);

    // Reads min(file size, capacity) bytes. When no transfer is under way any more the files are marked as used, in the
    // same order as above.
    std::uint64_t submit_read(std::vector<std::string> paths, std::vector<std::uint64_t> addresses,
                              std::vector<std::uint64_t> capacities);

    // The same for objects below `base` (docs/formats/files.md). `frame_names`: of each the digest of its namespace and
    // its chunk hash. What is not that frame, whole and with the right checksum, fails with EBADMSG.
    std::uint64_t submit_read_frames(const std::string& base, std::vector<std::uint64_t> addresses,
                                     std::vector<std::uint64_t> capacities, std::vector<std::byte> frame_names);

    std::uint64_t submit_stat(std::vector<std::string> paths);
    std::uint64_t submit_unlink(std::vector<std::string> paths);

    // Removes each of these folders if nothing is in it, and then the one above it on the same condition. A folder that
    // is gone already is no failure; ENOTEMPTY is one. What is being written is never lost by that: see submit_write.
    std::uint64_t submit_remove_empty(std::vector<std::string> folders);

    std::vector<Completion> drain() { return queue_.drain(); }

    // Transfers that went through the page cache although O_DIRECT was asked for: the file system does not have it, or
    // an address or length was not aligned.
    std::uint64_t buffered_fallbacks() const { return context_.buffered_fallbacks; }

    // Waits for everything submitted, then stops the threads. Results stay available to drain(). Idempotent.
    void close() { queue_.close(); }

private:
    struct TransferSource;

    std::uint64_t submit(std::shared_ptr<FileJob> job);
    void work();
    void run(const std::shared_ptr<FileJob>& job, std::size_t index);
    void end_transfer(const FileTransfer& transfer, IoOutcome outcome);
    void end_file(const std::shared_ptr<FileJob>& job);

    FileTransferContext context_;
    FilePublisher publisher_;
    JobQueue<FileJob> queue_;
};

}  // namespace lmcache
