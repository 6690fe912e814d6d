// File descriptors that close themselves.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>
#include <utility>

namespace lmcache {

class UniqueFd {
public:
    UniqueFd() = default;
    explicit UniqueFd(int fd) : fd_(fd) {}
    UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    UniqueFd& operator=(UniqueFd&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~UniqueFd() { (void)close(); }

    int get() const { return fd_; }
    bool valid() const { return fd_ >= 0; }
    // To whoever closes it instead.
    int release() { return std::exchange(fd_, -1); }
    // Returns 0 or an errno: network file systems report lost writes here. Idempotent.
    int close() {
        const int fd = release();
        // After EINTR the descriptor is closed all the same.
        return fd < 0 || ::close(fd) == 0 || errno == EINTR ? 0 : errno;
    }

private:
    int fd_ = -1;
};

// An eventfd: readable from signal() until reset().
class EventFd {
public:
    // Throws std::system_error.
    EventFd() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
        if (!fd_.valid()) throw std::system_error(errno, std::generic_category(), "eventfd");
    }
    int get() const { return fd_.get(); }
    void signal() noexcept {
        const std::uint64_t increment = 1;
        while (::write(fd_.get(), &increment, sizeof increment) < 0 && errno == EINTR) {
        }
    }
    void reset() noexcept {
        std::uint64_t count;
        while (::read(fd_.get(), &count, sizeof count) < 0 && errno == EINTR) {
        }
    }

private:
    UniqueFd fd_;
};

}  // namespace lmcache
