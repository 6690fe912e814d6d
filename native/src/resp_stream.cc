#include "lmcache/resp_stream.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <memory>

#include "lmcache/host_lookup.h"

namespace lmcache {
namespace {

constexpr int kWantRead = 2, kWantWrite = 3, kSystemCall = 5, kClosed = 6;  // SSL_ERROR_...
constexpr std::size_t kMaxTlsBytes = 1 << 30;                               // of one call, whose size is an int
constexpr std::size_t kMaxParts = 64;                                       // of one sendmsg, below IOV_MAX

[[noreturn]] void fail(int error, const std::string& act) { throw RespFault(error, act + ": " + std::strerror(error)); }

int milliseconds_until(RespDeadline deadline) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, INT_MAX));
}

// A peer that never pauses makes nobody wait, and must not hold a thread and its memory longer than one that does.
void check_in_time(RespDeadline deadline) {
    if (std::chrono::steady_clock::now() >= deadline)
        throw RespFault(ETIMEDOUT, "the server does not end its answer in time");
}

// Takes the first `bytes` off the parts.
std::span<iovec> skip_written(std::span<iovec> parts, std::size_t bytes) {
    while (!parts.empty() && bytes >= parts.front().iov_len) {
        bytes -= parts.front().iov_len;
        parts = parts.subspan(1);
    }
    if (bytes != 0) {
        parts.front().iov_base = static_cast<std::byte*>(parts.front().iov_base) + bytes;
        parts.front().iov_len -= bytes;
    }
    return parts;
}

HostAddresses resolve(const RespAddress& address, int stop_fd, RespDeadline deadline) {
    const HostLookupResult found = look_up_host(address.host, address.port, stop_fd, deadline);
    const std::string name = "the host name " + address.host;
    switch (found.kind) {
        case HostLookupResult::Kind::kFound:
            return found.addresses;
        case HostLookupResult::Kind::kRefused:
            throw RespFault(EHOSTUNREACH, name + " cannot be resolved: " + ::gai_strerror(found.error));
        case HostLookupResult::Kind::kTooLate:
            throw RespFault(ETIMEDOUT, name + " is not resolved in time");
        case HostLookupResult::Kind::kStopped:
            throw RespFault(ECANCELED, "the client is being closed");
        case HostLookupResult::Kind::kTooMany:
            break;
    }
    throw RespFault(EAGAIN, name + " waits for other names that are not resolved");
}

void set_tcp_options(int fd) {
    constexpr int kOn = 1, kIdleSeconds = 30, kProbeSeconds = 10, kProbes = 3;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &kOn, sizeof kOn);
    // A peer that is gone without a word is noticed also while nothing is asked.
    ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &kOn, sizeof kOn);
    ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &kIdleSeconds, sizeof kIdleSeconds);
    ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &kProbeSeconds, sizeof kProbeSeconds);
    ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &kProbes, sizeof kProbes);
}

}  // namespace

RespStream::RespStream(const RespAddress& address, const TlsContext* tls, int stop_fd, RespDeadline deadline)
    : tls_(tls), stop_fd_(stop_fd), buffer_(std::make_unique<std::byte[]>(kBufferBytes)) {
    connect(address, deadline);
    if (tls_ == nullptr) return;
    try {
        start_tls(address, deadline);
    } catch (...) {
        if (session_ != nullptr) tls_->library().session_free(session_);
        throw;
    }
}

RespStream::~RespStream() {
    if (session_ != nullptr) tls_->library().session_free(session_);
}

void RespStream::connect(const RespAddress& address, RespDeadline deadline) {
    const auto attempt = [&](int family, const sockaddr* to, socklen_t size, RespDeadline until) {
        socket_ = UniqueFd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        if (!socket_.valid()) return errno;
        if (::connect(socket_.get(), to, size) == 0) return 0;
        if (errno != EINPROGRESS) return errno;
        try {
            wait(POLLOUT, until);
        } catch (const RespFault& fault) {
            if (fault.error != ETIMEDOUT) throw;
            return ETIMEDOUT;
        }
        int error = 0;
        socklen_t error_size = sizeof error;
        return ::getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &error_size) == 0 ? error : errno;
    };
    if (address.is_path()) {
        sockaddr_un path{};
        path.sun_family = AF_UNIX;
        if (address.host.size() >= sizeof path.sun_path) fail(ENAMETOOLONG, "cannot connect to " + address.text());
        std::memcpy(path.sun_path, address.host.data(), address.host.size());
        if (const int error = attempt(AF_UNIX, reinterpret_cast<const sockaddr*>(&path), sizeof path, deadline);
            error != 0)
            fail(error, "cannot connect to " + address.text());
        return;
    }
    const HostAddresses addresses = resolve(address, stop_fd_, deadline);
    const addrinfo* const list = addresses.get();
    int error = EHOSTUNREACH, left = 0;
    for (const addrinfo* next = list; next != nullptr; next = next->ai_next) ++left;
    for (const addrinfo* next = list; next != nullptr; next = next->ai_next, --left) {
        // One that swallows what it gets leaves time for the others.
        const auto start = std::chrono::steady_clock::now();
        error = attempt(next->ai_family, next->ai_addr, next->ai_addrlen, start + (deadline - start) / left);
        if (error != 0) continue;
        set_tcp_options(socket_.get());
        return;
    }
    if (error == ETIMEDOUT) throw RespFault(error, address.text() + " does not answer in time");
    fail(error, "cannot connect to " + address.text());
}

void RespStream::start_tls(const RespAddress& address, RespDeadline deadline) {
    const auto& tls = tls_->library();
    try {
        session_ = tls_->new_session(socket_.get(), address.host);
    } catch (const TlsError& error) {
        throw RespFault(EACCES, error.what());
    }
    for (;;) {
        tls.clear_errors();
        const int result = tls.connect(session_);
        if (result == 1) return;
        const int kind = tls.session_error(session_, result);
        if (kind == kWantRead || kind == kWantWrite) {
            wait(kind == kWantRead ? POLLIN : POLLOUT, deadline);
            continue;
        }
        const long verified = tls.verify_result(session_);
        const std::string reason = tls.last_error();
        if (verified != 0)
            throw RespFault(EACCES,
                            "the certificate of " + address.text() + " is refused: " + tls.verify_text(verified));
        throw RespFault(ECONNRESET, "TLS with " + address.text() +
                                        " fails: " + (reason.empty() ? "the server closed the connection" : reason));
    }
}

void RespStream::wait(short events, RespDeadline deadline) {
    pollfd waiting[2] = {{socket_.get(), events, 0}, {stop_fd_, POLLIN, 0}};
    for (;;) {
        const int ready = ::poll(waiting, 2, milliseconds_until(deadline));
        if (ready < 0 && errno != EINTR) fail(errno, "poll");
        if (ready > 0 && waiting[1].revents != 0) throw RespFault(ECANCELED, "the client is being closed");
        if (ready > 0) return;
        if (ready == 0) throw RespFault(ETIMEDOUT, "the server does not answer in time");
    }
}

// What a call of the TLS library came to.
RespStream::Step RespStream::tls_step(int result, const char* act) {
    if (result > 0) return {static_cast<std::size_t>(result), 0};
    const auto& tls = tls_->library();
    const int system_error = errno;
    switch (tls.session_error(session_, result)) {
        case kWantRead:
            return {0, POLLIN};
        case kWantWrite:
            return {0, POLLOUT};
        case kClosed:
            throw RespFault(ECONNRESET, "the server closed the connection");
        case kSystemCall:
            fail(system_error == 0 ? ECONNRESET : system_error, act);
        default:
            throw RespFault(ECONNRESET, std::string(act) + ": " + tls.last_error());
    }
}

RespStream::Step RespStream::receive(std::byte* memory, std::size_t bytes) {
    if (session_ != nullptr) {
        tls_->library().clear_errors();
        errno = 0;
        return tls_step(tls_->library().read(session_, memory, static_cast<int>(std::min(bytes, kMaxTlsBytes))),
                        "read");
    }
    const ssize_t received = ::recv(socket_.get(), memory, bytes, 0);
    if (received > 0) return {static_cast<std::size_t>(received), 0};
    if (received == 0) throw RespFault(ECONNRESET, "the server closed the connection");
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return {0, POLLIN};
    fail(errno, "read");
}

RespStream::Step RespStream::send(std::span<const iovec> parts) {
    if (session_ != nullptr) {
        tls_->library().clear_errors();
        errno = 0;
        const iovec& first = parts.front();
        return tls_step(
            tls_->library().write(session_, first.iov_base, static_cast<int>(std::min(first.iov_len, kMaxTlsBytes))),
            "write");
    }
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts.data());
    message.msg_iovlen = std::min(parts.size(), kMaxParts);
    const ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
    if (sent >= 0) return {static_cast<std::size_t>(sent), 0};
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return {0, POLLOUT};
    fail(errno, "write");
}

void RespStream::write(std::span<iovec> parts, RespDeadline deadline) {
    parts = skip_written(parts, 0);
    while (!parts.empty()) {
        const Step step = send(parts);
        if (step.wait != 0) wait(step.wait, deadline);
        parts = skip_written(parts, step.bytes);
    }
}

std::size_t RespStream::receive_some(std::byte* memory, std::size_t bytes, RespDeadline deadline) {
    for (;;) {
        check_in_time(deadline);
        const Step step = receive(memory, bytes);
        if (step.wait == 0) return step.bytes;
        wait(step.wait, deadline);
    }
}

// More behind what is buffered.
void RespStream::fill(RespDeadline deadline) {
    if (begin_ == end_) begin_ = end_ = 0;
    if (end_ == kBufferBytes) {
        std::memmove(buffer_.get(), buffer_.get() + begin_, end_ - begin_);
        end_ -= begin_;
        begin_ = 0;
    }
    end_ += receive_some(buffer_.get() + end_, kBufferBytes - end_, deadline);
}

std::string_view RespStream::read_line(RespDeadline deadline) {
    std::size_t searched = 0;
    for (;;) {
        const std::string_view seen(reinterpret_cast<const char*>(buffer_.get()) + begin_, end_ - begin_);
        if (const std::size_t end = seen.find('\n', searched); end != std::string_view::npos) {
            begin_ += end + 1;
            if (end == 0 || seen[end - 1] != '\r')
                throw RespFault(EPROTO, "a line of the server has no CR before its LF");
            return seen.substr(0, end - 1);
        }
        if (seen.size() > kMaxLineBytes) throw RespFault(EPROTO, "a line of the server has no end");
        searched = seen.size();
        fill(deadline);
    }
}

void RespStream::read(std::byte* memory, std::uint64_t bytes, RespDeadline deadline) {
    const std::size_t buffered = std::min<std::uint64_t>(bytes, end_ - begin_);
    std::memcpy(memory, buffer_.get() + begin_, buffered);
    begin_ += buffered;
    for (std::uint64_t done = buffered; done < bytes;) {
        check_in_time(deadline);
        const Step step = receive(memory + done, bytes - done);
        done += step.bytes;
        if (step.wait == 0) continue;
        wake_at(bytes - done);
        wait(step.wait, deadline);
    }
    wake_at(1);
}

// From how many bytes on a wait ends: woken for each segment, a thread would spend as much time on that as on copying.
void RespStream::wake_at(std::uint64_t bytes) {
    constexpr std::uint64_t kMost = 512 << 10;
    const int wanted = session_ == nullptr ? static_cast<int>(std::min(bytes, kMost)) : 1;
    if (wanted == woken_at_) return;
    if (::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted) == 0) woken_at_ = wanted;
}

void RespStream::skip(std::uint64_t bytes, RespDeadline deadline) {
    for (;;) {
        const std::size_t buffered = std::min<std::uint64_t>(bytes, end_ - begin_);
        begin_ += buffered;
        bytes -= buffered;
        if (bytes == 0) return;
        fill(deadline);
    }
}

}  // namespace lmcache
