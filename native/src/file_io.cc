#include "lmcache/file_io.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <ctime>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace lmcache {
namespace {

// Prompts can be reconstructed from KV: never readable by everybody, by the group only if the umask allows it.
constexpr mode_t kFileMode = 0660;
constexpr mode_t kFolderMode = 0770;

enum class Kind { kWrite, kRead, kStat, kUnlink };

// Read batches whose files still have to be marked as used; beyond it the oldest marks are given up.
constexpr std::size_t kMaxUnmarkedBatches = 1024;
enum class Publication : std::uint8_t { kPending, kWritten, kFailed };

struct Outcome {
    std::int64_t result = 0;
    int error = 0;
};

Outcome failure(int error) { return {-1, error}; }

struct Batch {
    std::uint64_t number = 0;
    Kind kind = Kind::kStat;
    std::vector<std::string> paths;
    std::vector<std::string> temporary_paths;
    std::vector<std::uint64_t> addresses;
    std::vector<std::uint64_t> sizes;
    timespec submitted{};

    // Guarded by the queue's mutex.
    std::size_t next = 0;
    std::size_t unfinished = 0;
    // Each element is written by one thread, and read after `unfinished` reached 0.
    std::vector<std::int64_t> results;
    std::vector<std::int32_t> errors;

    // Guarded by the publication mutex.
    std::vector<Publication> publication;
    std::size_t next_to_publish = 0;
    std::atomic<bool> broken{false};

    void set(std::size_t index, Outcome outcome) {
        results[index] = outcome.result;
        errors[index] = outcome.error;
    }
};

class Descriptor {
public:
    explicit Descriptor(int fd) : fd_(fd) {}
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
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
    int fd_;
};

int open_file(const std::string& path, int flags, mode_t mode = 0) {
    int fd;
    do {
        fd = ::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, mode);
    } while (fd < 0 && errno == EINTR);
    return fd;
}

// The two folders above a file: its namespace and its fan-out. What lies above them must exist: when the base folder is
// gone (unmounted, removed), writing must fail and not fill another disk.
int make_parents(const std::string& path) {
    const std::size_t parent_end = path.rfind('/');
    if (parent_end == std::string::npos || parent_end == 0) return ENOENT;
    const std::string parent = path.substr(0, parent_end);
    if (::mkdir(parent.c_str(), kFolderMode) == 0 || errno == EEXIST) return 0;
    if (errno != ENOENT) return errno;
    const std::size_t grandparent_end = parent.rfind('/');
    if (grandparent_end == std::string::npos || grandparent_end == 0) return ENOENT;
    const std::string grandparent = parent.substr(0, grandparent_end);
    if (::mkdir(grandparent.c_str(), kFolderMode) != 0 && errno != EEXIST) return errno;
    return ::mkdir(parent.c_str(), kFolderMode) == 0 || errno == EEXIST ? 0 : errno;
}

timespec microseconds_before(timespec time, std::size_t microseconds) {
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

}  // namespace

class FileIO::State {
public:
    explicit State(const FileIOOptions& options) : options_(options) {
        if (options.threads == 0 || options.threads > kMaxThreads)
            throw std::invalid_argument("threads must be between 1 and " + std::to_string(kMaxThreads));
        const std::size_t block = options.block_bytes;
        if (block == 0 || (block & (block - 1)) != 0) throw std::invalid_argument("block_bytes must be a power of two");
        event_fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (event_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
        try {
            threads_.reserve(options.threads);
            for (unsigned i = 0; i < options.threads; ++i) threads_.emplace_back([this] { work(); });
        } catch (...) {
            close();
            ::close(event_fd_);
            throw;
        }
    }

    ~State() {
        close();
        ::close(event_fd_);
    }

    int event_fd() const { return event_fd_; }
    std::uint64_t buffered_fallbacks() const { return buffered_fallbacks_.load(std::memory_order_relaxed); }

    std::uint64_t submit(Kind kind, std::vector<std::string> paths, std::vector<std::string> temporary_paths,
                         std::vector<std::uint64_t> addresses, std::vector<std::uint64_t> sizes) {
        const std::size_t count = paths.size();
        if (count > kMaxBatchFiles)
            throw std::invalid_argument("a batch holds at most " + std::to_string(kMaxBatchFiles) + " files");
        const bool has_memory = kind == Kind::kWrite || kind == Kind::kRead;
        if (has_memory && (addresses.size() != count || sizes.size() != count))
            throw std::invalid_argument("paths, addresses and sizes must have the same length");
        if (kind == Kind::kWrite && temporary_paths.size() != count)
            throw std::invalid_argument("paths and temporary paths must have the same length");

        auto batch = std::make_shared<Batch>();
        batch->kind = kind;
        batch->paths = std::move(paths);
        batch->temporary_paths = std::move(temporary_paths);
        batch->addresses = std::move(addresses);
        batch->sizes = std::move(sizes);
        batch->unfinished = count;
        batch->results.resize(count);
        batch->errors.resize(count);
        if (has_memory) ::clock_gettime(CLOCK_REALTIME, &batch->submitted);
        if (kind == Kind::kWrite) batch->publication.resize(count, Publication::kPending);

        std::unique_lock lock(mutex_);
        if (closing_) throw std::invalid_argument("the FileIO is closed");
        batch->number = ++last_batch_;
        if (count == 0) {
            finish(*batch);
            return batch->number;
        }
        if (kind == Kind::kWrite) {
            std::lock_guard publication_lock(publication_mutex_);
            publication_order_.push_back(batch);
        }
        (has_memory ? transfers_ : quick_).push_back(batch);
        const std::uint64_t number = batch->number;
        lock.unlock();
        if (count == 1)
            work_ready_.notify_one();
        else
            work_ready_.notify_all();
        return number;
    }

    std::vector<FinishedBatch> drain() {
        std::lock_guard lock(mutex_);
        std::uint64_t count;
        while (::read(event_fd_, &count, sizeof count) < 0 && errno == EINTR) {
        }
        std::vector<FinishedBatch> finished;
        finished.swap(finished_);
        return finished;
    }

    void close() {
        {
            std::unique_lock lock(mutex_);
            closing_ = true;
            work_ready_.notify_all();
        }
        std::lock_guard lock(close_mutex_);
        for (auto& thread : threads_)
            if (thread.joinable()) thread.join();
    }

private:
    void work() {
        std::unique_lock lock(mutex_);
        for (;;) {
            // Lookups and deletions are short and go first; lookups decide how long an engine waits. Marks wait until
            // nobody waits: each may have to wait itself, for the file system's journal.
            auto& queue = !quick_.empty() ? quick_ : !transfers_.empty() ? transfers_ : unmarked_;
            if (queue.empty()) {
                // A thread with nothing to take may leave: what others still run was taken by them.
                if (closing_) return;
                work_ready_.wait(lock);
                continue;
            }
            const std::shared_ptr<Batch> batch = queue.front();
            const std::size_t index = batch->next++;
            if (batch->next == batch->paths.size()) queue.pop_front();
            const bool marks = &queue == &unmarked_;
            lock.unlock();
            if (marks)
                (void)::utimensat(AT_FDCWD, batch->paths[index].c_str(), UseTimes(*batch, index).values,
                                  AT_SYMLINK_NOFOLLOW);
            else
                run(batch, index);
            lock.lock();
        }
    }

    void run(const std::shared_ptr<Batch>& batch, std::size_t index) {
        switch (batch->kind) {
            case Kind::kWrite: {
                const Outcome outcome =
                    batch->broken.load(std::memory_order_relaxed) ? failure(ECANCELED) : write(*batch, index);
                batch->set(index, outcome);
                publish(*batch, index, outcome.error == 0 ? Publication::kWritten : Publication::kFailed);
                return;
            }
            case Kind::kRead:
                batch->set(index, read(*batch, index));
                break;
            case Kind::kStat:
                batch->set(index, stat(batch->paths[index]));
                break;
            case Kind::kUnlink:
                batch->set(index, ::unlink(batch->paths[index].c_str()) == 0 ? Outcome{} : failure(errno));
                break;
        }
        settle(batch);
    }

    void settle(const std::shared_ptr<Batch>& batch) {
        std::lock_guard lock(mutex_);
        if (--batch->unfinished != 0) return;
        finish(*batch);
        if (batch->kind != Kind::kRead) return;
        batch->next = 0;
        unmarked_.push_back(batch);
        if (unmarked_.size() > kMaxUnmarkedBatches) unmarked_.pop_front();
    }

    // Needs mutex_.
    void finish(Batch& batch) {
        finished_.push_back({batch.number, std::move(batch.results), std::move(batch.errors)});
        const std::uint64_t one = 1;
        while (::write(event_fd_, &one, sizeof one) < 0 && errno == EINTR) {
        }
    }

    // Renames, in order of submission, whatever is ready. One thread at a time publishes; the others leave their file
    // to it and go on writing.
    void publish(Batch& own, std::size_t own_index, Publication state) {
        std::unique_lock lock(publication_mutex_);
        own.publication[own_index] = state;
        if (publishing_) return;
        publishing_ = true;
        while (!publication_order_.empty()) {
            const std::shared_ptr<Batch> batch = publication_order_.front();
            const std::size_t index = batch->next_to_publish;
            const Publication ready = batch->publication[index];
            if (ready == Publication::kPending) break;
            batch->next_to_publish = index + 1;
            if (batch->next_to_publish == batch->paths.size()) publication_order_.pop_front();
            lock.unlock();
            if (ready == Publication::kWritten) publish_one(*batch, index);
            if (batch->errors[index] != 0) batch->broken.store(true, std::memory_order_relaxed);
            settle(batch);
            lock.lock();
        }
        publishing_ = false;
    }

    static void publish_one(Batch& batch, std::size_t index) {
        const std::string& temporary = batch.temporary_paths[index];
        const std::string& path = batch.paths[index];
        if (batch.broken.load(std::memory_order_relaxed)) {
            ::unlink(temporary.c_str());
            batch.set(index, failure(ECANCELED));
            return;
        }
        int error = ::rename(temporary.c_str(), path.c_str()) == 0 ? 0 : errno;
        if (error == ENOENT) {  // temporary files live elsewhere, and this is the first file of its folder
            error = make_parents(path);
            if (error == 0) error = ::rename(temporary.c_str(), path.c_str()) == 0 ? 0 : errno;
        }
        if (error == 0) return;
        ::unlink(temporary.c_str());
        batch.set(index, failure(error));
    }

    bool aligned(std::uint64_t value) const { return (value & (options_.block_bytes - 1)) == 0; }

    void count_fallback() { buffered_fallbacks_.fetch_add(1, std::memory_order_relaxed); }

    // Opens with O_DIRECT where asked for and possible; `direct` tells which it became.
    int open_for_transfer(const std::string& path, int flags, mode_t mode, bool& direct) {
        if (direct) {
            const int fd = open_file(path, flags | O_DIRECT, mode);
            if (fd >= 0 || (errno != EINVAL && errno != EOPNOTSUPP)) return fd;
            // Some file systems create the file before they refuse the flag.
            if ((flags & O_CREAT) != 0) ::unlink(path.c_str());
            direct = false;
            count_fallback();
        }
        return open_file(path, flags, mode);
    }

    bool leave_direct(int fd, bool& direct) {
        const int flags = ::fcntl(fd, F_GETFL);
        if (flags < 0 || ::fcntl(fd, F_SETFL, flags & ~O_DIRECT) != 0) return false;
        direct = false;
        count_fallback();
        return true;
    }

    Outcome write(Batch& batch, std::size_t index) {
        const std::string& path = batch.temporary_paths[index];
        constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL;
        bool direct = options_.use_odirect;
        if (direct && !(aligned(batch.addresses[index]) && aligned(batch.sizes[index]))) {
            direct = false;
            count_fallback();
        }
        int fd = open_for_transfer(path, kFlags, kFileMode, direct);
        if (fd < 0 && errno == ENOENT) {
            const int error = make_parents(path);
            if (error != 0) return failure(error);
            fd = open_for_transfer(path, kFlags, kFileMode, direct);
        }
        if (fd < 0) return failure(errno);
        Descriptor file(fd);
        int error = write_all(file.get(), batch.addresses[index], batch.sizes[index], direct);
        if (error == 0) {
            (void)::futimens(file.get(), UseTimes(batch, index).values);
            error = file.close();
        }
        if (error != 0) {
            ::unlink(path.c_str());
            return failure(error);
        }
        return {static_cast<std::int64_t>(batch.sizes[index]), 0};
    }

    int write_all(int fd, std::uint64_t address, std::uint64_t size, bool direct) {
        std::uint64_t done = 0;
        while (done < size) {
            // What remains after a short write may not be aligned any more.
            if (direct && !aligned(done) && !leave_direct(fd, direct)) return errno;
            iovec part{reinterpret_cast<void*>(address + done), size - done};
            const ssize_t moved = ::pwritev(fd, &part, 1, static_cast<off_t>(done));
            if (moved > 0) {
                done += static_cast<std::uint64_t>(moved);
            } else if (moved == 0) {
                return EIO;
            } else if (errno == EINVAL && direct) {
                if (!leave_direct(fd, direct)) return EINVAL;
            } else if (errno != EINTR) {
                return errno;
            }
        }
        return 0;
    }

    Outcome read(Batch& batch, std::size_t index) {
        const std::uint64_t address = batch.addresses[index];
        const std::uint64_t capacity = batch.sizes[index];
        bool direct = options_.use_odirect;
        if (direct && !(aligned(address) && aligned(capacity))) {
            direct = false;
            count_fallback();
        }
        // O_NONBLOCK: somebody's FIFO under this name must not hang a thread. It means nothing to a file.
        Descriptor file(open_for_transfer(batch.paths[index], O_RDONLY | O_NONBLOCK, 0, direct));
        if (!file.valid()) return failure(errno);
        struct stat info{};
        if (::fstat(file.get(), &info) != 0) return failure(errno);
        if (!S_ISREG(info.st_mode)) return failure(EINVAL);
        const std::uint64_t size = std::min<std::uint64_t>(static_cast<std::uint64_t>(info.st_size), capacity);
        std::uint64_t done = 0;
        while (done < size) {
            if (direct && !aligned(done) && !leave_direct(file.get(), direct)) return failure(errno);
            std::uint64_t wanted = size - done;
            if (done == 0 && options_.read_ahead_bytes != 0)
                wanted = std::min<std::uint64_t>(wanted, options_.read_ahead_bytes);
            // Whole blocks, as O_DIRECT asks; the read ends at the end of the file, and `capacity` is whole blocks too.
            if (direct) wanted = (wanted + options_.block_bytes - 1) & ~(options_.block_bytes - 1);
            iovec part{reinterpret_cast<void*>(address + done), wanted};
            const ssize_t moved = ::preadv(file.get(), &part, 1, static_cast<off_t>(done));
            if (moved > 0) {
                done += static_cast<std::uint64_t>(moved);
            } else if (moved == 0) {
                break;  // truncated since fstat
            } else if (errno == EINVAL && direct) {
                if (!leave_direct(file.get(), direct)) return failure(EINVAL);
            } else if (errno != EINTR) {
                return failure(errno);
            }
        }
        return {static_cast<std::int64_t>(std::min(done, capacity)), 0};
    }

    static Outcome stat(const std::string& path) {
        struct stat info{};
        if (::lstat(path.c_str(), &info) != 0) return failure(errno);
        if (!S_ISREG(info.st_mode)) return failure(EINVAL);
        return {static_cast<std::int64_t>(info.st_size), 0};
    }

    const FileIOOptions options_;
    int event_fd_ = -1;
    std::atomic<std::uint64_t> buffered_fallbacks_{0};

    std::mutex mutex_;
    std::condition_variable work_ready_;
    std::deque<std::shared_ptr<Batch>> quick_;
    std::deque<std::shared_ptr<Batch>> transfers_;
    std::deque<std::shared_ptr<Batch>> unmarked_;
    std::vector<FinishedBatch> finished_;
    std::uint64_t last_batch_ = 0;
    bool closing_ = false;

    std::mutex publication_mutex_;  // taken after mutex_ in submit(); never held while taking mutex_
    std::deque<std::shared_ptr<Batch>> publication_order_;
    bool publishing_ = false;

    std::mutex close_mutex_;
    std::vector<std::thread> threads_;
};

FileIO::FileIO(const FileIOOptions& options) : state_(std::make_unique<State>(options)) {}
FileIO::~FileIO() = default;

int FileIO::event_fd() const { return state_->event_fd(); }

std::uint64_t FileIO::submit_write(std::vector<std::string> paths, std::vector<std::string> temporary_paths,
                                   std::vector<std::uint64_t> addresses, std::vector<std::uint64_t> sizes) {
    return state_->submit(Kind::kWrite, std::move(paths), std::move(temporary_paths), std::move(addresses),
                          std::move(sizes));
}

std::uint64_t FileIO::submit_read(std::vector<std::string> paths, std::vector<std::uint64_t> addresses,
                                  std::vector<std::uint64_t> capacities) {
    return state_->submit(Kind::kRead, std::move(paths), {}, std::move(addresses), std::move(capacities));
}

std::uint64_t FileIO::submit_stat(std::vector<std::string> paths) {
    return state_->submit(Kind::kStat, std::move(paths), {}, {}, {});
}

std::uint64_t FileIO::submit_unlink(std::vector<std::string> paths) {
    return state_->submit(Kind::kUnlink, std::move(paths), {}, {}, {});
}

std::vector<FinishedBatch> FileIO::drain() { return state_->drain(); }
std::uint64_t FileIO::buffered_fallbacks() const { return state_->buffered_fallbacks(); }
void FileIO::close() { state_->close(); }

}  // namespace lmcache
