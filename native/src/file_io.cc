#include "lmcache/file_io.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <ctime>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "file_batch.h"
#include "file_folders.h"
#include "lmcache/bus_guard.h"
#include "lmcache/object_path.h"
#include "lmcache/ring.h"
#include "lmcache/ring_loop.h"

namespace lmcache {
namespace {

using namespace file_batch;
using namespace file_folders;

// As for folders (file_folders.h).
constexpr mode_t kFileMode = 0660;

// From this size on mapping a file costs less than it saves.
constexpr std::size_t kMappedBytes = 1 << 20;

// Read batches whose files still have to be marked as used: so many wait until nothing is transferred; beyond the
// second number the oldest marks are given up.
constexpr std::size_t kPatientBatches = 64;
constexpr std::size_t kMaxUnmarkedBatches = 1024;

int open_file(const std::string& path, int flags, mode_t mode = 0) {
    int fd;
    do {
        fd = ::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, mode);
    } while (fd < 0 && errno == EINTR);
    return fd;
}

}  // namespace

class FileIO::State {
public:
    explicit State(const FileIOOptions& options) : options_(options) {
        if (options.threads == 0 || options.threads > kMaxThreads)
            throw std::invalid_argument("threads must be between 1 and " + std::to_string(kMaxThreads));
        const std::size_t block = options.block_bytes;
        if (block == 0 || (block & (block - 1)) != 0) throw std::invalid_argument("block_bytes must be a power of two");
        if (options.queue_depth > kMaxQueueDepth)
            throw std::invalid_argument("queue_depth must be at most " + std::to_string(kMaxQueueDepth));
        install_bus_handler();
        event_fd_ = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
        wake_fd_ = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
        if (!event_fd_.valid() || !wake_fd_.valid()) throw std::system_error(errno, std::generic_category(), "eventfd");
        try {
            threads_.reserve(options.threads + 1);
            for (unsigned i = 0; i < options.threads; ++i) threads_.emplace_back([this] { work(); });
            if (uses_ring()) {
                std::promise<int> created;
                auto refusal = created.get_future();
                threads_.emplace_back(
                    [this, created = std::move(created)]() mutable { work_ring(std::move(created)); });
                if (const int error = refusal.get(); error != 0)
                    throw std::system_error(error, std::generic_category(), "io_uring");
            }
        } catch (...) {
            close();
            throw;
        }
    }

    ~State() { close(); }

    int event_fd() const { return event_fd_.get(); }
    std::uint64_t buffered_fallbacks() const { return buffered_fallbacks_.load(std::memory_order_relaxed); }

    std::uint64_t submit(Kind kind, std::vector<std::string> paths, std::vector<std::string> temporary_paths,
                         std::vector<std::uint64_t> addresses, std::vector<std::uint64_t> sizes,
                         std::vector<std::byte> frame_names = {}) {
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
        batch->frame_names = std::move(frame_names);
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
        if (has_memory) ++transferring_;
        const std::uint64_t number = batch->number;
        lock.unlock();
        if (has_memory && uses_ring())
            add_event(wake_fd_.get());
        else if (count == 1)
            work_ready_.notify_one();
        else
            work_ready_.notify_all();
        return number;
    }

    std::vector<FinishedBatch> drain() {
        std::lock_guard lock(mutex_);
        take_events(event_fd_.get());
        std::vector<FinishedBatch> finished;
        finished.swap(finished_);
        return finished;
    }

    void close() {
        {
            std::unique_lock lock(mutex_);
            closing_ = true;
            work_ready_.notify_all();
            add_event(wake_fd_.get());
        }
        std::lock_guard lock(close_mutex_);
        for (auto& thread : threads_)
            if (thread.joinable()) thread.join();
    }

private:
    bool uses_ring() const { return options_.queue_depth != 0; }

    void work() {
        std::unique_lock lock(mutex_);
        for (;;) {
            // Lookups and deletions are short and go first; lookups decide how long an engine waits.
            auto& queue = !quick_.empty() ? quick_ : !transfers_.empty() && !uses_ring() ? transfers_ : unmarked_;
            if (queue.empty() || (&queue == &unmarked_ && !may_mark())) {
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
            case Kind::kWrite:
            case Kind::kRead: {
                FileStep step;
                step.batch = batch;
                step.index = index;
                if (begin(step)) {
                    while (!absorb(step, move(step))) {
                    }
                }
                return;
            }
            case Kind::kStat:
                batch->set(index, stat(batch->paths[index]));
                break;
            case Kind::kUnlink:
                batch->set(index, ::unlink(batch->paths[index].c_str()) == 0 ? Outcome{} : failure(errno));
                break;
            case Kind::kRemoveEmpty:
                if (const int error = remove_empty(batch->paths[index]); error != 0) batch->set(index, failure(error));
                break;
        }
        settle(batch);
    }

    // Needs mutex_. Marks wait until nobody waits for a transfer: on the last files of a batch they would compete with
    // those that read them, and each may have to wait itself, for the file system's journal.
    bool may_mark() const { return transferring_ == 0 || unmarked_.size() > kPatientBatches; }

    void settle(const std::shared_ptr<Batch>& batch) {
        if (batch->unfinished.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        std::lock_guard lock(mutex_);
        finish(*batch);
        if (batch->kind == Kind::kRead) {
            batch->next = 0;
            unmarked_.push_back(batch);
            if (unmarked_.size() > kMaxUnmarkedBatches) unmarked_.pop_front();
        }
        if (batch->kind == Kind::kRead || batch->kind == Kind::kWrite) --transferring_;
        if (uses_ring() && !unmarked_.empty() && may_mark()) work_ready_.notify_one();
    }

    // Needs mutex_.
    void finish(Batch& batch) {
        finished_.push_back({batch.number, std::move(batch.results), std::move(batch.errors)});
        add_event(event_fd_.get());
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
        // Where temporary files live elsewhere this may be the first file of its folder.
        const int error = in_folder_of(path, base_of(path),
                                       [&] { return ::rename(temporary.c_str(), path.c_str()) == 0 ? 0 : errno; });
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

    // Opens the file of a step. False when the step has ended with that.
    bool begin(FileStep& step) {
        Batch& batch = *step.batch;
        if (step.writes() && batch.broken.load(std::memory_order_relaxed)) return !end(step, failure(ECANCELED));
        step.direct = options_.use_odirect;
        if (step.direct && !(aligned(batch.addresses[step.index]) && aligned(batch.sizes[step.index]))) {
            step.direct = false;
            count_fallback();
        }
        const int error = step.writes() ? open_new(step) : open_existing(step);
        if (error != 0) return !end(step, failure(error));
        if (step.size == 0) return !end(step, {0, 0});
        if (!step.writes() && !step.direct && !uses_ring() && !batch.frame_names.empty() && take_mapped(step))
            return !end(step, {static_cast<std::int64_t>(step.size), 0});
        return next_part(step) || !end(step, failure(errno));
    }

    int open_new(FileStep& step) {
        const std::string& path = step.batch->temporary_paths[step.index];
        constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL;
        step.size = step.batch->sizes[step.index];
        return in_folder_of(path, base_of(step.batch->paths[step.index]), [&] {
            step.file = Descriptor(open_for_transfer(path, kFlags, kFileMode, step.direct));
            return step.file.valid() ? 0 : errno;
        });
    }

    int open_existing(FileStep& step) {
        // O_NONBLOCK: somebody's FIFO under this name must not hang a thread. It means nothing to a file.
        step.file = Descriptor(open_for_transfer(step.batch->paths[step.index], O_RDONLY | O_NONBLOCK, 0, step.direct));
        if (!step.file.valid()) return errno;
        struct stat info{};
        if (::fstat(step.file.get(), &info) != 0) return errno;
        if (!S_ISREG(info.st_mode)) return EINVAL;
        step.size = std::min<std::uint64_t>(static_cast<std::uint64_t>(info.st_size), step.batch->sizes[step.index]);
        return 0;
    }

    // Plans what to ask for. False, with errno, when that is not possible.
    bool next_part(FileStep& step) {
        // What remains after a short transfer may not be aligned any more.
        if (step.direct && !aligned(step.done) && !leave_direct(step.file.get(), step.direct)) return false;
        std::uint64_t wanted = step.size - step.done;
        if (!step.writes()) {
            if (step.done == 0 && options_.read_ahead_bytes != 0)
                wanted = std::min<std::uint64_t>(wanted, options_.read_ahead_bytes);
            // Whole blocks, as O_DIRECT asks; the read ends at the end of the file, and the memory is whole blocks too.
            if (step.direct) wanted = (wanted + options_.block_bytes - 1) & ~(options_.block_bytes - 1);
        }
        step.part = {reinterpret_cast<void*>(step.batch->addresses[step.index] + step.done), wanted};
        return true;
    }

    static std::int64_t move(const FileStep& step) {
        const auto offset = static_cast<off_t>(step.done);
        const ssize_t moved = step.writes() ? ::pwritev(step.file.get(), &step.part, 1, offset)
                                            : ::preadv(step.file.get(), &step.part, 1, offset);
        return moved < 0 ? -errno : moved;
    }

    // Takes in what the kernel said. True when the step has ended; else the next part is planned.
    bool absorb(FileStep& step, std::int64_t moved) {
        if (moved == -EINTR || moved == -EAGAIN) return false;
        if (moved == -EINVAL && step.direct) {
            if (!leave_direct(step.file.get(), step.direct)) return end(step, failure(EINVAL));
            return !next_part(step) && end(step, failure(errno));
        }
        if (moved < 0) return end(step, failure(static_cast<int>(-moved)));
        if (moved == 0 && step.writes()) return end(step, failure(EIO));
        step.done += static_cast<std::uint64_t>(moved);
        // Nothing more where there should be: truncated since fstat.
        if (moved == 0 || step.done >= step.size)
            return end(step, {static_cast<std::int64_t>(std::min(step.done, step.batch->sizes[step.index])), 0});
        return !next_part(step) && end(step, failure(errno));
    }

    static bool is_frame(const FileStep& step, std::int64_t size) {
        const Batch& batch = *step.batch;
        return frame_verify(batch.memory(step.index), static_cast<std::uint64_t>(size),
                            batch.namespace_digest(step.index), batch.chunk_hash(step.index)) == FrameFault::kNone;
    }

    // A large frame that the page cache has, as far as its first and last byte tell, is checked in the same pass in
    // which it is copied. False: not so; it has to be read.
    static bool take_mapped(FileStep& step) {
        const Batch& batch = *step.batch;
        const auto size = static_cast<std::size_t>(step.size);
        if (size < kMappedBytes || !is_cached(step.file.get(), 0) || !is_cached(step.file.get(), size - 1))
            return false;
        void* const mapped = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, step.file.get(), 0);
        if (mapped == MAP_FAILED) return false;
        const auto* const source = static_cast<const std::byte*>(mapped);
        FrameFault fault = FrameFault::kNone;
        const bool copied = guarded(source, size, [&] {  // truncated meanwhile, it raises SIGBUS
            fault = frame_copy_verified(batch.memory(step.index), source, size, batch.namespace_digest(step.index),
                                        batch.chunk_hash(step.index));
        });
        ::munmap(mapped, size);
        step.verified = copied && fault == FrameFault::kNone;
        return step.verified;
    }

    static bool is_cached(int fd, std::size_t offset) {
        char byte;
        const iovec part{&byte, 1};
        return ::preadv2(fd, &part, 1, static_cast<off_t>(offset), RWF_NOWAIT) == 1;
    }

    // Closes the file and hands the outcome on. Always true: the step has ended.
    bool end(FileStep& step, Outcome outcome) {
        Batch& batch = *step.batch;
        if (!step.writes()) {
            step.file.close();
            if (outcome.error == 0 && !batch.frame_names.empty() && !step.verified && !is_frame(step, outcome.result))
                outcome = failure(EBADMSG);
            batch.set(step.index, outcome);
            settle(step.batch);
            return true;
        }
        if (step.file.valid()) {
            if (outcome.error == 0) {
                (void)::futimens(step.file.get(), UseTimes(batch, step.index).values);
                if (const int error = step.file.close(); error != 0) outcome = failure(error);
            }
            if (outcome.error != 0) ::unlink(batch.temporary_paths[step.index].c_str());
        }
        batch.set(step.index, outcome);
        publish(batch, step.index, outcome.error == 0 ? Publication::kWritten : Publication::kFailed);
        return true;
    }

    // ---- io_uring: what run_ring asks for ----
    struct RingSource {
        using Step = FileStep;
        Taken take(Step& step) {
            std::lock_guard lock(state.mutex_);
            if (state.transfers_.empty()) return state.closing_ ? Taken::kEnd : Taken::kNothing;
            step.batch = state.transfers_.front();
            step.index = step.batch->next++;
            if (step.batch->next == step.batch->paths.size()) state.transfers_.pop_front();
            return Taken::kStep;
        }
        bool begin(Step& step) { return state.begin(step); }
        void start(Ring& ring, const Step& step, std::uint64_t tag) {
            if (step.writes())
                ring.write(step.file.get(), &step.part, 1, step.done, tag);
            else
                ring.read(step.file.get(), &step.part, 1, step.done, tag);
        }
        bool absorb(Step& step, std::int64_t moved) { return state.absorb(step, moved); }
        State& state;
    };

    void work_ring(std::promise<int> created) {
        int error = 0;
        const auto ring = Ring::create(options_.queue_depth + 1, error);  // one more, to be woken
        created.set_value(ring ? 0 : error);
        if (!ring) return;
        RingSource source{*this};
        run_ring(*ring, options_.queue_depth, wake_fd_.get(), source);
        work();  // the marks of the last reads; the other threads may have left
    }

    static Outcome stat(const std::string& path) {
        struct stat info{};
        if (::lstat(path.c_str(), &info) != 0) return failure(errno);
        if (!S_ISREG(info.st_mode)) return failure(EINVAL);
        return {static_cast<std::int64_t>(info.st_size), 0};
    }

    const FileIOOptions options_;
    Descriptor event_fd_, wake_fd_;
    std::atomic<std::uint64_t> buffered_fallbacks_{0};

    std::mutex mutex_;
    std::condition_variable work_ready_;
    std::deque<std::shared_ptr<Batch>> quick_;
    std::deque<std::shared_ptr<Batch>> transfers_;
    std::deque<std::shared_ptr<Batch>> unmarked_;
    std::vector<FinishedBatch> finished_;
    std::uint64_t last_batch_ = 0;
    std::size_t transferring_ = 0;  // batches that read or write and have not ended
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

std::uint64_t FileIO::submit_read_frames(const std::string& base, std::vector<std::uint64_t> addresses,
                                         std::vector<std::uint64_t> capacities, std::vector<std::byte> frame_names) {
    if (frame_names.size() % kFrameNameBytes != 0)
        throw std::invalid_argument("frame_names must hold a namespace digest and a chunk hash for each file");
    std::vector<std::string> paths;
    paths.reserve(frame_names.size() / kFrameNameBytes);
    for (auto rest = std::span<const std::byte>(frame_names); !rest.empty(); rest = rest.subspan(kFrameNameBytes))
        paths.push_back(object_path(base, rest.first<kDigestBytes>(), rest.subspan<kDigestBytes, kChunkHashBytes>()));
    return state_->submit(Kind::kRead, std::move(paths), {}, std::move(addresses), std::move(capacities),
                          std::move(frame_names));
}

std::uint64_t FileIO::submit_stat(std::vector<std::string> paths) {
    return state_->submit(Kind::kStat, std::move(paths), {}, {}, {});
}

std::uint64_t FileIO::submit_unlink(std::vector<std::string> paths) {
    return state_->submit(Kind::kUnlink, std::move(paths), {}, {}, {});
}

std::uint64_t FileIO::submit_remove_empty(std::vector<std::string> folders) {
    return state_->submit(Kind::kRemoveEmpty, std::move(folders), {}, {}, {});
}

std::vector<FinishedBatch> FileIO::drain() { return state_->drain(); }
std::uint64_t FileIO::buffered_fallbacks() const { return state_->buffered_fallbacks(); }
void FileIO::close() { state_->close(); }

}  // namespace lmcache
