// What FileIO works on: batches of files, and one file of a batch on its way to or from memory.
#pragma once

#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lmcache/frame.h"

namespace lmcache::file_batch {

enum class Kind { kWrite, kRead, kStat, kUnlink, kRemoveEmpty };

inline constexpr std::size_t kFrameNameBytes = kDigestBytes + kChunkHashBytes;

enum class Publication : std::uint8_t { kPending, kWritten, kFailed };

struct Outcome {
    std::int64_t result = 0;
    int error = 0;
};

inline Outcome failure(int error) { return {-1, error}; }

struct Batch {
    std::uint64_t number = 0;
    Kind kind = Kind::kStat;
    std::vector<std::string> paths;
    std::vector<std::string> temporary_paths;
    std::vector<std::uint64_t> addresses;
    std::vector<std::uint64_t> sizes;
    std::vector<std::byte> frame_names;  // kFrameNameBytes a file, or nothing
    timespec submitted{};

    // Guarded by the queue's mutex.
    std::size_t next = 0;

    std::atomic<std::size_t> unfinished{0};  // files
    // Each element is written by one thread, and read after `unfinished` reached 0.
    std::vector<std::int64_t> results;
    std::vector<std::int32_t> errors;

    // Guarded by the publication mutex.
    std::vector<Publication> publication;
    std::size_t next_to_publish = 0;
    std::atomic<bool> broken{false};

    std::byte* memory(std::size_t index) const { return reinterpret_cast<std::byte*>(addresses[index]); }
    std::span<const std::byte, kDigestBytes> namespace_digest(std::size_t index) const {
        return std::span(frame_names).subspan(index * kFrameNameBytes).first<kDigestBytes>();
    }
    std::span<const std::byte, kChunkHashBytes> chunk_hash(std::size_t index) const {
        return std::span(frame_names).subspan(index * kFrameNameBytes + kDigestBytes).first<kChunkHashBytes>();
    }

    void set(std::size_t index, Outcome outcome) {
        results[index] = outcome.result;
        errors[index] = outcome.error;
    }
};

class Descriptor {
public:
    Descriptor() = default;
    explicit Descriptor(int fd) : fd_(fd) {}
    Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Descriptor() {
        if (fd_ >= 0) ::close(fd_);
    }
    int get() const { return fd_; }
    bool valid() const { return fd_ >= 0; }
    // Network file systems report lost writes here. After EINTR the descriptor is closed all the same.
    int close() {
        const int fd = fd_;
        fd_ = -1;
        return ::close(fd) == 0 || errno == EINTR ? 0 : errno;
    }

private:
    int fd_ = -1;
};

inline timespec microseconds_before(timespec time, std::size_t microseconds) {
    const long nanoseconds = static_cast<long>(microseconds % 1000000) * 1000;
    time.tv_sec -= static_cast<time_t>(microseconds / 1000000);
    if (time.tv_nsec < nanoseconds) {
        time.tv_sec -= 1;
        time.tv_nsec += 1000000000;
    }
    time.tv_nsec -= nanoseconds;
    return time;
}

// Recency survives restarts as the access time, set by hand so that mount options do not matter; a new file gets it as
// modification time too, since the later of both counts. Best effort: a file of another user, or one that is gone, is
// left as it is.
struct UseTimes {
    UseTimes(const Batch& batch, std::size_t index) {
        values[0] = microseconds_before(batch.submitted, index);
        values[1] = values[0];
        if (batch.kind != Kind::kWrite) values[1].tv_nsec = UTIME_OMIT;
    }
    timespec values[2]{};
};

// A file on its way to or from memory.
struct FileStep {
    std::shared_ptr<Batch> batch;
    std::size_t index = 0;
    Descriptor file;
    bool direct = false;
    std::uint64_t done = 0, size = 0;
    bool verified = false;  // the frame in memory is the one that was wanted
    iovec part{};           // what is asked for next

    bool writes() const { return batch->kind == Kind::kWrite; }
};

}  // namespace lmcache::file_batch
