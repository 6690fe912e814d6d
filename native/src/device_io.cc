#include "lmcache/device_io.h"

#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <future>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "lmcache/limits.h"
#include "lmcache/ring.h"
#include "lmcache/ring_loop.h"

namespace lmcache {
namespace {

enum class Kind { kWrite, kRead, kSync };

constexpr std::size_t kHeadBytes = kFrameHeaderBytes;

struct Batch {
    std::uint64_t number = 0;
    Kind kind = Kind::kRead;
    std::vector<Transfer> transfers;

    // Guarded by the queue's mutex.
    std::size_t next = 0;
    std::size_t unfinished = 0;
    // Each element is written by one thread, and read after `unfinished` reached 0.
    std::vector<std::int64_t> results;
    std::vector<std::int32_t> errors;
};

struct Free {
    void operator()(char* memory) const { std::free(memory); }
};

// One transfer under way: what of it remains.
struct Step {
    std::shared_ptr<Batch> batch;
    std::size_t index = 0;
    iovec parts[2]{};
    unsigned first_part = 0, part_count = 0;
    std::uint64_t offset = 0, done = 0, total = 0;
    std::unique_ptr<char, Free> own_memory;

    const Transfer& transfer() const { return batch->transfers[index]; }
    bool writes() const { return batch->kind == Kind::kWrite; }

    void advance(std::uint64_t bytes) {
        done += bytes;
        offset += bytes;
        while (bytes != 0) {
            iovec& part = parts[first_part];
            const std::uint64_t here = std::min<std::uint64_t>(bytes, part.iov_len);
            part.iov_base = static_cast<char*>(part.iov_base) + here;
            part.iov_len -= here;
            bytes -= here;
            if (part.iov_len == 0 && first_part + 1 < part_count) ++first_part;
        }
    }
};

}  // namespace

class DeviceIO::State {
public:
    explicit State(const DeviceIOOptions& options) : options_(options) {
        const bool ring = options.queue_depth != 0;
        if (!ring && (options.threads == 0 || options.threads > kMaxThreads))
            throw std::invalid_argument("threads must be between 1 and " + std::to_string(kMaxThreads));
        if (options.queue_depth > kMaxQueueDepth)
            throw std::invalid_argument("queue_depth must be at most " + std::to_string(kMaxQueueDepth));
        const std::size_t align = options.align_bytes;
        if (align == 0 || (align & (align - 1)) != 0) throw std::invalid_argument("align_bytes must be a power of two");
        event_fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        wake_fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        try {
            if (event_fd_ < 0 || wake_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
            if (ring) {
                std::promise<int> created;
                auto refusal = created.get_future();
                threads_.emplace_back(
                    [this, created = std::move(created)]() mutable { work_ring(std::move(created)); });
                if (const int error = refusal.get(); error != 0)
                    throw std::system_error(error, std::generic_category(), "io_uring");
            } else {
                threads_.reserve(options.threads);
                for (unsigned i = 0; i < options.threads; ++i) threads_.emplace_back([this] { work(); });
            }
        } catch (...) {
            close();
            close_descriptors();
            throw;
        }
    }

    ~State() {
        close();
        close_descriptors();
    }

    int event_fd() const { return event_fd_; }
    std::uint64_t copied() const { return copied_.load(std::memory_order_relaxed); }

    std::uint64_t submit(Kind kind, std::vector<Transfer> transfers) {
        const std::size_t count = transfers.size();
        if (count > kMaxBatch)
            throw std::invalid_argument("a batch holds at most " + std::to_string(kMaxBatch) + " transfers");
        for (const Transfer& transfer : transfers)
            if (transfer.head != 0 && transfer.size < kHeadBytes)
                throw std::invalid_argument("a transfer with a head must have at least 4096 bytes");
        auto batch = std::make_shared<Batch>();
        batch->kind = kind;
        batch->transfers = std::move(transfers);
        batch->unfinished = count;
        batch->results.resize(count);
        batch->errors.resize(count);
        std::unique_lock lock(mutex_);
        if (closing_) throw std::invalid_argument("the DeviceIO is closed");
        batch->number = ++last_batch_;
        if (count == 0) {
            finish(*batch);
            return batch->number;
        }
        queue_.push_back(batch);
        lock.unlock();
        if (options_.queue_depth != 0)
            add_event(wake_fd_);
        else if (count == 1)
            work_ready_.notify_one();
        else
            work_ready_.notify_all();
        return batch->number;
    }

    std::vector<FinishedBatch> drain() {
        std::lock_guard lock(mutex_);
        take_events(event_fd_);
        std::vector<FinishedBatch> finished;
        finished.swap(finished_);
        return finished;
    }

    void close() {
        {
            std::lock_guard lock(mutex_);
            closing_ = true;
            work_ready_.notify_all();
            if (wake_fd_ >= 0) add_event(wake_fd_);
        }
        std::lock_guard lock(close_mutex_);
        for (auto& thread : threads_)
            if (thread.joinable()) thread.join();
    }

private:
    void close_descriptors() {
        if (event_fd_ >= 0) ::close(event_fd_);
        if (wake_fd_ >= 0) ::close(wake_fd_);
    }

    // Needs mutex_ and a queue that is not empty.
    Step take() {
        Step step;
        step.batch = queue_.front();
        step.index = step.batch->next++;
        if (step.batch->next == step.batch->transfers.size()) queue_.pop_front();
        return step;
    }

    bool aligned(std::uint64_t value) const { return (value & (options_.align_bytes - 1)) == 0; }

    // Returns an errno.
    int prepare(Step& step) {
        const Transfer& transfer = step.transfer();
        step.offset = transfer.offset;
        step.total = transfer.size;
        if (step.batch->kind == Kind::kSync) return 0;
        const bool direct = aligned(transfer.address) && aligned(transfer.size) && aligned(transfer.head) &&
                            (transfer.head == 0 || aligned(kHeadBytes)) && !options_.copy_always;
        if (!direct) return prepare_copy(step);
        if (transfer.head == 0) {
            step.parts[step.part_count++] = {reinterpret_cast<void*>(transfer.address), transfer.size};
            return 0;
        }
        step.parts[step.part_count++] = {reinterpret_cast<void*>(transfer.head), kHeadBytes};
        if (transfer.size > kHeadBytes)
            step.parts[step.part_count++] = {reinterpret_cast<void*>(transfer.address + kHeadBytes),
                                             transfer.size - kHeadBytes};
        return 0;
    }

    int prepare_copy(Step& step) {
        const Transfer& transfer = step.transfer();
        copied_.fetch_add(1, std::memory_order_relaxed);
        const std::size_t align = std::max<std::size_t>(options_.align_bytes, kHeadBytes);
        step.total = (transfer.size + options_.align_bytes - 1) & ~(options_.align_bytes - 1);
        void* memory = nullptr;
        if (const int error = ::posix_memalign(&memory, align, std::max<std::uint64_t>(step.total, 1)); error != 0)
            return error;
        step.own_memory.reset(static_cast<char*>(memory));
        step.parts[step.part_count++] = {memory, step.total};
        if (!step.writes()) return 0;
        char* const to = step.own_memory.get();
        std::memcpy(to, reinterpret_cast<const void*>(transfer.address), transfer.size);
        if (transfer.head != 0) std::memcpy(to, reinterpret_cast<const void*>(transfer.head), kHeadBytes);
        std::memset(to + transfer.size, 0, step.total - transfer.size);
        return 0;
    }

    // Takes in what the kernel said about a step. True when the step has ended.
    bool absorb(Step& step, std::int64_t moved) {
        if (moved == -EINTR || moved == -EAGAIN) return false;
        if (moved < 0) return end(step, static_cast<int>(-moved));
        if (step.batch->kind == Kind::kSync) return end(step, 0);
        if (moved == 0 && step.done < step.total) return end(step, step.writes() ? EIO : 0);
        step.advance(static_cast<std::uint64_t>(moved));
        if (step.done == step.total) return end(step, 0);
        // What remains after a short transfer cannot be asked for: the end of the file or device is here.
        if (!aligned(step.done)) return end(step, step.writes() ? EIO : 0);
        return false;
    }

    bool end(Step& step, int error) {
        const Transfer& transfer = step.transfer();
        std::int64_t result = -1;
        if (error == 0) {
            const std::uint64_t moved = std::min(step.done, transfer.size);
            if (step.own_memory != nullptr && !step.writes())
                std::memcpy(reinterpret_cast<void*>(transfer.address), step.own_memory.get(), moved);
            result = static_cast<std::int64_t>(moved);
        }
        step.own_memory.reset();
        step.batch->results[step.index] = result;
        step.batch->errors[step.index] = error;
        std::lock_guard lock(mutex_);
        if (--step.batch->unfinished == 0) finish(*step.batch);
        return true;
    }

    // Needs mutex_.
    void finish(Batch& batch) {
        finished_.push_back({batch.number, std::move(batch.results), std::move(batch.errors)});
        add_event(event_fd_);
    }

    // ---- threads ----
    void work() {
        for (;;) {
            std::unique_lock lock(mutex_);
            work_ready_.wait(lock, [this] { return !queue_.empty() || closing_; });
            if (queue_.empty()) return;
            Step step = take();
            lock.unlock();
            if (const int error = prepare(step); error != 0) {
                end(step, error);
                continue;
            }
            while (!absorb(step, move(step))) {
            }
        }
    }

    std::int64_t move(Step& step) {
        const int count = static_cast<int>(step.part_count - step.first_part);
        const iovec* const parts = step.parts + step.first_part;
        const auto offset = static_cast<off_t>(step.offset);
        std::int64_t moved = 0;
        if (step.batch->kind == Kind::kSync)
            moved = ::fdatasync(options_.fd);
        else if (step.writes())
            moved = ::pwritev(options_.fd, parts, count, offset);
        else
            moved = ::preadv(options_.fd, parts, count, offset);
        return moved < 0 ? -errno : moved;
    }

    // ---- io_uring: what run_ring asks for ----
    struct RingSource {
        using Step = lmcache::Step;
        Taken take(Step& step) {
            std::lock_guard lock(state.mutex_);
            if (state.queue_.empty()) return state.closing_ ? Taken::kEnd : Taken::kNothing;
            step = state.take();
            return Taken::kStep;
        }
        bool begin(Step& step) {
            const int error = state.prepare(step);
            return error == 0 || !state.end(step, error);
        }
        void start(Ring& ring, const Step& step, std::uint64_t tag) {
            const unsigned count = step.part_count - step.first_part;
            const int fd = state.options_.fd;
            if (step.batch->kind == Kind::kSync)
                ring.sync_data(fd, tag);
            else if (step.writes())
                ring.write(fd, step.parts + step.first_part, count, step.offset, tag);
            else
                ring.read(fd, step.parts + step.first_part, count, step.offset, tag);
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
        run_ring(*ring, options_.queue_depth, wake_fd_, source);
    }

    const DeviceIOOptions options_;
    int event_fd_ = -1;
    int wake_fd_ = -1;
    std::atomic<std::uint64_t> copied_{0};

    std::mutex mutex_;
    std::condition_variable work_ready_;
    std::deque<std::shared_ptr<Batch>> queue_;
    std::vector<FinishedBatch> finished_;
    std::uint64_t last_batch_ = 0;
    bool closing_ = false;

    std::mutex close_mutex_;
    std::vector<std::thread> threads_;
};

DeviceIO::DeviceIO(const DeviceIOOptions& options) : state_(std::make_unique<State>(options)) {}
DeviceIO::~DeviceIO() = default;

int DeviceIO::event_fd() const { return state_->event_fd(); }
std::uint64_t DeviceIO::submit_write(std::vector<Transfer> transfers) {
    return state_->submit(Kind::kWrite, std::move(transfers));
}
std::uint64_t DeviceIO::submit_read(std::vector<Transfer> transfers) {
    return state_->submit(Kind::kRead, std::move(transfers));
}
std::uint64_t DeviceIO::submit_sync() { return state_->submit(Kind::kSync, std::vector<Transfer>(1)); }
std::vector<FinishedBatch> DeviceIO::drain() { return state_->drain(); }
std::uint64_t DeviceIO::copied() const { return state_->copied(); }
void DeviceIO::close() { state_->close(); }

}  // namespace lmcache
