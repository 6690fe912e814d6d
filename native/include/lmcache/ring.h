// An io_uring, by the kernel's interface alone. One thread owns it: the one that created it.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace lmcache {

class Ring {
public:
    struct Completion {
        std::uint64_t tag = 0;
        std::int32_t result = 0;  // bytes, or -errno
    };

    // nullptr where the kernel or a sandbox refuses; `error` then is the errno.
    static std::unique_ptr<Ring> create(unsigned entries, int& error);
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;
    ~Ring();

    // At most `entries` operations may be under way. What the pointers lead to must live until the completion.
    void read(int fd, const iovec* parts, unsigned count, std::uint64_t offset, std::uint64_t tag);
    void write(int fd, const iovec* parts, unsigned count, std::uint64_t offset, std::uint64_t tag);
    void sync_data(int fd, std::uint64_t tag);
    void poll_readable(int fd, std::uint64_t tag);

    // Hands everything prepared to the kernel and waits until there is a completion. Returns 0 or an errno.
    int submit_and_wait();

    std::optional<Completion> pop();

private:
    struct Queues;
    explicit Ring(std::unique_ptr<Queues> queues);

    std::unique_ptr<Queues> queues_;
};

// Whether this machine lets this process use one: 0, or the errno that says why not. Tried once.
int ring_refusal();

}  // namespace lmcache
