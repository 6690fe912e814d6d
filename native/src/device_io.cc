#include "lmcache/device_io.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "lmcache/io_uring.h"
#include "lmcache/limits.h"
#include "lmcache/rounding.h"

namespace lmcache {
namespace {

constexpr std::size_t kHeadBytes = kFrameHeaderBytes;

const DeviceIOOptions& checked(const DeviceIOOptions& options) {
    if (options.queue_depth == 0 && (options.threads == 0 || options.threads > DeviceIO::kMaxThreads))
        throw std::invalid_argument("threads must be between 1 and " + std::to_string(DeviceIO::kMaxThreads));
    if (options.queue_depth > DeviceIO::kMaxQueueDepth)
        throw std::invalid_argument("queue_depth must be at most " + std::to_string(DeviceIO::kMaxQueueDepth));
    const std::size_t align = options.align_bytes;
    if (align == 0 || (align & (align - 1)) != 0) throw std::invalid_argument("align_bytes must be a power of two");
    return options;
}

struct Free {
    void operator()(char* memory) const { std::free(memory); }
};

}  // namespace

// One transfer under way (a Step of transfer_loop.h): what of it remains.
class DeviceIO::Step {
public:
    Step() = default;
    Step(DeviceIO& io, const JobQueue<DeviceJob>::Piece& piece) : io_(&io), job_(piece.job), index_(piece.begin) {}

    std::optional<IoOutcome> begin() {
        const Transfer& wanted = transfer();
        offset_ = wanted.offset;
        total_bytes_ = wanted.size;
        if (job_->act == DeviceAct::kSync) return std::nullopt;
        const bool is_direct = is_aligned(wanted.address) && is_aligned(wanted.size) && is_aligned(wanted.head) &&
                               (wanted.head == 0 || is_aligned(kHeadBytes)) && !io_->options_.copy_always;
        if (!is_direct) return begin_copy();
        if (wanted.head == 0) {
            add_part(reinterpret_cast<void*>(wanted.address), wanted.size);
            return std::nullopt;
        }
        add_part(reinterpret_cast<void*>(wanted.head), kHeadBytes);
        if (wanted.size > kHeadBytes)
            add_part(reinterpret_cast<void*>(wanted.address + kHeadBytes), wanted.size - kHeadBytes);
        return std::nullopt;
    }

    std::int64_t move() const {
        const int count = static_cast<int>(part_count_ - first_part_);
        const iovec* const parts = parts_ + first_part_;
        const auto offset = static_cast<off_t>(offset_);
        std::int64_t moved = 0;
        switch (job_->act) {
            case DeviceAct::kSync:
                moved = ::fdatasync(io_->options_.fd);
                break;
            case DeviceAct::kWrite:
                moved = ::pwritev(io_->options_.fd, parts, count, offset);
                break;
            case DeviceAct::kRead:
                moved = ::preadv(io_->options_.fd, parts, count, offset);
                break;
        }
        return moved < 0 ? -errno : moved;
    }

    void start(IoUring& ring, std::uint64_t tag) const {
        const unsigned count = part_count_ - first_part_;
        const int fd = io_->options_.fd;
        switch (job_->act) {
            case DeviceAct::kSync:
                return ring.sync_data(fd, tag);
            case DeviceAct::kWrite:
                return ring.write(fd, parts_ + first_part_, count, offset_, tag);
            case DeviceAct::kRead:
                return ring.read(fd, parts_ + first_part_, count, offset_, tag);
        }
    }

    std::optional<IoOutcome> absorb(std::int64_t moved) {
        if (moved == -EINTR || moved == -EAGAIN) return std::nullopt;
        if (moved < 0) return io_failure(static_cast<int>(-moved));
        if (job_->act == DeviceAct::kSync) return IoOutcome{};
        advance(static_cast<std::uint64_t>(moved));
        if (done_bytes_ == total_bytes_) return moved_bytes();
        // What remains after a short transfer cannot be asked for: the end of the file or device is here.
        if (moved != 0 && is_aligned(done_bytes_)) return std::nullopt;
        return writes() ? io_failure(EIO) : moved_bytes();
    }

    void end(IoOutcome outcome) {
        own_memory_.reset();
        job_->results.set(index_, outcome);
        io_->queue_.ended(*job_);
    }

private:
    const Transfer& transfer() const { return job_->transfers[index_]; }
    bool writes() const { return job_->act == DeviceAct::kWrite; }
    bool is_aligned(std::uint64_t value) const { return (value & (io_->options_.align_bytes - 1)) == 0; }
    void add_part(void* memory, std::size_t size_bytes) { parts_[part_count_++] = {memory, size_bytes}; }

    // Through memory of its own, which is aligned.
    std::optional<IoOutcome> begin_copy() {
        const Transfer& wanted = transfer();
        io_->copied_.fetch_add(1, std::memory_order_relaxed);
        const std::size_t align = std::max<std::size_t>(io_->options_.align_bytes, kHeadBytes);
        total_bytes_ = round_up<std::uint64_t>(wanted.size, io_->options_.align_bytes);
        void* memory = nullptr;
        if (const int error = ::posix_memalign(&memory, align, std::max<std::uint64_t>(total_bytes_, 1)); error != 0)
            return io_failure(error);
        own_memory_.reset(static_cast<char*>(memory));
        add_part(memory, total_bytes_);
        if (!writes()) return std::nullopt;
        char* const to = own_memory_.get();
        std::memcpy(to, reinterpret_cast<const void*>(wanted.address), wanted.size);
        if (wanted.head != 0) std::memcpy(to, reinterpret_cast<const void*>(wanted.head), kHeadBytes);
        std::memset(to + wanted.size, 0, total_bytes_ - wanted.size);
        return std::nullopt;
    }

    void advance(std::uint64_t bytes) {
        done_bytes_ += bytes;
        offset_ += bytes;
        while (bytes != 0) {
            iovec& part = parts_[first_part_];
            const std::uint64_t taken = std::min<std::uint64_t>(bytes, part.iov_len);
            part.iov_base = static_cast<char*>(part.iov_base) + taken;
            part.iov_len -= taken;
            bytes -= taken;
            if (part.iov_len == 0 && first_part_ + 1 < part_count_) ++first_part_;
        }
    }

    IoOutcome moved_bytes() const {
        const std::uint64_t moved = std::min(done_bytes_, transfer().size);
        if (own_memory_ != nullptr && !writes())
            std::memcpy(reinterpret_cast<void*>(transfer().address), own_memory_.get(), moved);
        return {static_cast<std::int64_t>(moved), 0};
    }

    DeviceIO* io_ = nullptr;
    std::shared_ptr<DeviceJob> job_;
    std::size_t index_ = 0;
    iovec parts_[2]{};
    unsigned first_part_ = 0, part_count_ = 0;
    std::uint64_t offset_ = 0, done_bytes_ = 0, total_bytes_ = 0;
    std::unique_ptr<char, Free> own_memory_;
};

struct DeviceIO::StepSource {
    Taken take(Step& step) {
        JobQueue<DeviceJob>::Piece piece;
        const Taken taken = io->queue_.poll(piece);
        if (taken == Taken::kPiece) step = Step(*io, piece);
        return taken;
    }
    void end(Step& step, IoOutcome outcome) { step.end(outcome); }
    DeviceIO* io;
};

DeviceIO::DeviceIO(const DeviceIOOptions& options)
    : options_(checked(options)), queue_(kMaxIoJobs, options.queue_depth != 0) {
    if (options.queue_depth != 0)
        start_io_uring<Step>(queue_, options.queue_depth, StepSource{this}, [] {});
    else
        queue_.start_threads(options.threads, "lmcache-device", [this] { work(); });
}

std::uint64_t DeviceIO::submit(DeviceAct act, std::vector<Transfer> transfers) {
    if (transfers.size() > kMaxJobTransfers)
        throw std::invalid_argument("a job has at most " + std::to_string(kMaxJobTransfers) + " transfers");
    for (const Transfer& transfer : transfers)
        if (transfer.head != 0 && transfer.size < kHeadBytes)
            throw std::invalid_argument("a transfer with a head must have at least 4096 bytes");
    auto job = std::make_shared<DeviceJob>();
    job->act = act;
    job->elements = transfers.size();
    job->results.resize(transfers.size());
    job->transfers = std::move(transfers);
    return queue_.submit(std::move(job));
}

void DeviceIO::work() {
    JobQueue<DeviceJob>::Piece piece;
    while (queue_.take(piece)) {
        Step step(*this, piece);
        step.end(run_to_end(step));
    }
}

std::uint64_t DeviceIO::submit_write(std::vector<Transfer> transfers) {
    return submit(DeviceAct::kWrite, std::move(transfers));
}
std::uint64_t DeviceIO::submit_read(std::vector<Transfer> transfers) {
    return submit(DeviceAct::kRead, std::move(transfers));
}
std::uint64_t DeviceIO::submit_sync() { return submit(DeviceAct::kSync, std::vector<Transfer>(1)); }

}  // namespace lmcache
