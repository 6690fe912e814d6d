// An io_uring by system calls, without liburing. Used by one thread: the one that created it.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace lmcache {

class IoUring {
public:
    struct Completion {
        std::uint64_t tag = 0;
        std::int32_t result = 0;  // bytes, or -errno
    };

    // nullptr, and the errno in `error`, where the kernel or a sandbox refuses.
    static std::unique_ptr<IoUring> create(unsigned entries, int& error);
    IoUring(const IoUring&) = delete;
    IoUring& operator=(const IoUring&) = delete;
    ~IoUring();

    // At most `entries` operations may be under way. The memory of `parts` and of what they name must live until the
    // completion.
    void read(int fd, const iovec* parts, unsigned count, std::uint64_t offset, std::uint64_t tag);
    void write(int fd, const iovec* parts, unsigned count, std::uint64_t offset, std::uint64_t tag);
    void sync_data(int fd, std::uint64_t tag);
    void poll_readable(int fd, std::uint64_t tag);

    // Hands everything prepared to the kernel and waits until there is a completion. Returns 0 or an errno.
    int submit_and_wait();

    std::optional<Completion> pop();

private:
    struct Queues;
    explicit IoUring(std::unique_ptr<Queues> queues);

    std::unique_ptr<Queues> queues_;
};

// 0 where this process may use io_uring, else the errno of the refusal. Tried once.
int io_uring_refusal();

}  // namespace lmcache
