// Whole files to and from memory on native threads.
//
// Invariants:
// - A file appears under its final name only after every byte of it was written, by rename(2) from a temporary name.
// - Files written by one FileIO appear in the order of their submission: when the process dies at any moment, what is
//   there is a prefix of what was submitted, less the files that failed.
// - After the first failure in a batch the rest of that batch is not published (errno ECANCELED).
// - The caller's memory is touched until the batch is returned by drain(), and never afterwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace lmcache {

struct FinishedBatch {
    std::uint64_t batch = 0;
    std::vector<std::int64_t> results;  // bytes moved, file size (stat), 0 (unlink, remove_empty), or -1
    std::vector<std::int32_t> errors;   // errno where the result is -1, else 0
};

struct FileIOOptions {
    unsigned threads = 4;
    bool use_odirect = false;
    std::size_t block_bytes = 4096;    // O_DIRECT wants addresses and lengths that are multiples of it
    std::size_t read_ahead_bytes = 0;  // size of the first read of a file, 0: all at once
    unsigned queue_depth = 0;          // above 0: transfers by io_uring, at most that many at once; threads do the rest
};

// All methods are thread-safe. Submitting after close(), or lists of different lengths, throws std::invalid_argument.
class FileIO {
public:
    static constexpr unsigned kMaxThreads = 1024;
    static constexpr unsigned kMaxQueueDepth = 4096;
    static constexpr std::size_t kMaxBatchFiles = 16384;

    // std::system_error where io_uring is refused.
    explicit FileIO(const FileIOOptions& options);
    FileIO(const FileIO&) = delete;
    FileIO& operator=(const FileIO&) = delete;
    ~FileIO();

    // Readable when drain() has something.
    int event_fd() const;

    // Writes memory to a new file at the temporary path, then renames. Missing parent folders are made, two levels
    // deep, and made again when another server removes them before the file is in them. The access time of file i of a
    // batch is i microseconds before its submission: recency with suffixes first to go.
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

    std::vector<FinishedBatch> drain();

    // Operations that wanted O_DIRECT and had to go without.
    std::uint64_t buffered_fallbacks() const;

    // Waits for everything submitted, then stops the threads. Results stay available to drain(). Idempotent.
    void close();

private:
    class State;
    std::unique_ptr<State> state_;
};

}  // namespace lmcache
