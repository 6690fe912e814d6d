#include "lmcache/io_uring.h"

#include <linux/io_uring.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "lmcache/unique_fd.h"

// Newer than the oldest headers that this builds with. A kernel that refuses them gets a ring without them.
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

namespace lmcache {
namespace {

int setup(unsigned entries, io_uring_params& params) {
    return static_cast<int>(::syscall(__NR_io_uring_setup, entries, &params));
}

// Completions are then delivered to the thread that waits for them, without interrupting it.
constexpr unsigned kQuietFlags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
constexpr unsigned kNeededFeatures = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP;

template <typename T>
T* at(void* base, std::size_t offset) {
    return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

}  // namespace

struct IoUring::Queues {
    ~Queues() {
        if (entries != MAP_FAILED) ::munmap(entries, entries_bytes);
        if (rings != MAP_FAILED) ::munmap(rings, rings_bytes);
    }

    bool map(const io_uring_params& params) {
        rings_bytes = std::max<std::size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                            params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
        rings = ::mmap(nullptr, rings_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd.get(),
                       IORING_OFF_SQ_RING);
        if (rings == MAP_FAILED) return false;
        entries_bytes = params.sq_entries * sizeof(io_uring_sqe);
        entries = ::mmap(nullptr, entries_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd.get(),
                         IORING_OFF_SQES);
        if (entries == MAP_FAILED) return false;
        sq_tail = at<unsigned>(rings, params.sq_off.tail);
        sq_mask = *at<unsigned>(rings, params.sq_off.ring_mask);
        sq_array = at<unsigned>(rings, params.sq_off.array);
        cq_head = at<unsigned>(rings, params.cq_off.head);
        cq_tail = at<unsigned>(rings, params.cq_off.tail);
        cq_mask = *at<unsigned>(rings, params.cq_off.ring_mask);
        cqes = at<io_uring_cqe>(rings, params.cq_off.cqes);
        return true;
    }

    io_uring_sqe& next(std::uint8_t operation, int file, std::uint64_t tag) {
        const unsigned tail = *sq_tail + prepared++;
        const unsigned index = tail & sq_mask;
        sq_array[index] = index;
        io_uring_sqe& entry = static_cast<io_uring_sqe*>(entries)[index];
        std::memset(&entry, 0, sizeof entry);
        entry.opcode = operation;
        entry.fd = file;
        entry.user_data = tag;
        return entry;
    }

    bool has_completion() const {
        return *cq_head != std::atomic_ref<unsigned>(*cq_tail).load(std::memory_order_acquire);
    }

    UniqueFd fd;
    void* rings = MAP_FAILED;
    std::size_t rings_bytes = 0;
    void* entries = MAP_FAILED;
    std::size_t entries_bytes = 0;
    unsigned *sq_tail = nullptr, *sq_array = nullptr, *cq_head = nullptr, *cq_tail = nullptr;
    unsigned sq_mask = 0, cq_mask = 0;
    io_uring_cqe* cqes = nullptr;
    unsigned prepared = 0;   // written, the tail not yet moved
    unsigned unclaimed = 0;  // the tail moved, not yet taken by the kernel
};

IoUring::IoUring(std::unique_ptr<Queues> queues) : queues_(std::move(queues)) {}
IoUring::~IoUring() = default;

std::unique_ptr<IoUring> IoUring::create(unsigned entries, int& error) {
    auto queues = std::make_unique<Queues>();
    io_uring_params params{};
    params.flags = kQuietFlags;
    queues->fd = UniqueFd(setup(entries, params));
    if (!queues->fd.valid() && errno == EINVAL) {
        params = {};
        queues->fd = UniqueFd(setup(entries, params));
    }
    if (!queues->fd.valid()) {
        error = errno;
        return nullptr;
    }
    if ((params.features & kNeededFeatures) != kNeededFeatures) {
        error = ENOSYS;
        return nullptr;
    }
    if (!queues->map(params)) {
        error = errno;
        return nullptr;
    }
    return std::unique_ptr<IoUring>(new IoUring(std::move(queues)));
}

void IoUring::read(int fd, const iovec* parts, unsigned count, std::uint64_t offset, std::uint64_t tag) {
    io_uring_sqe& entry = queues_->next(IORING_OP_READV, fd, tag);
    entry.addr = reinterpret_cast<std::uint64_t>(parts);
    entry.len = count;
    entry.off = offset;
}

void IoUring::write(int fd, const iovec* parts, unsigned count, std::uint64_t offset, std::uint64_t tag) {
    io_uring_sqe& entry = queues_->next(IORING_OP_WRITEV, fd, tag);
    entry.addr = reinterpret_cast<std::uint64_t>(parts);
    entry.len = count;
    entry.off = offset;
}

void IoUring::sync_data(int fd, std::uint64_t tag) {
    queues_->next(IORING_OP_FSYNC, fd, tag).fsync_flags = IORING_FSYNC_DATASYNC;
}

void IoUring::poll_readable(int fd, std::uint64_t tag) {
    queues_->next(IORING_OP_POLL_ADD, fd, tag).poll_events = POLLIN;
}

int IoUring::submit_and_wait() {
    Queues& q = *queues_;
    if (q.prepared != 0) {
        std::atomic_ref<unsigned>(*q.sq_tail).store(*q.sq_tail + q.prepared, std::memory_order_release);
        q.unclaimed += q.prepared;
        q.prepared = 0;
    }
    for (;;) {
        const unsigned wanted = q.has_completion() ? 0 : 1;
        const long taken =
            ::syscall(__NR_io_uring_enter, q.fd.get(), q.unclaimed, wanted, IORING_ENTER_GETEVENTS, nullptr, 0);
        if (taken < 0) {
            if (errno == EINTR) continue;
            // The kernel wants completions to be fetched first, or is short of memory for a moment.
            if ((errno == EBUSY || errno == EAGAIN) && q.has_completion()) return 0;
            if (errno == EAGAIN || errno == EBUSY) {
                ::usleep(1000);
                continue;
            }
            return errno;
        }
        q.unclaimed -= static_cast<unsigned>(taken);
        if (q.has_completion()) return 0;
    }
}

std::optional<IoUring::Completion> IoUring::pop() {
    Queues& q = *queues_;
    if (!q.has_completion()) return std::nullopt;
    const unsigned head = *q.cq_head;
    const io_uring_cqe& entry = q.cqes[head & q.cq_mask];
    const Completion completion{entry.user_data, entry.res};
    std::atomic_ref<unsigned>(*q.cq_head).store(head + 1, std::memory_order_release);
    return completion;
}

int io_uring_refusal() {
    static const int refusal = [] {
        int error = 0;
        return IoUring::create(1, error) ? 0 : error;
    }();
    return refusal;
}

}  // namespace lmcache
