// A connection to a server of Redis' protocol as a stream of bytes: TCP or a Unix socket, with or without TLS, every
// wait with a deadline.
#pragma once

#include <sys/uio.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "lmcache/tls_library.h"
#include "lmcache/unique_fd.h"

namespace lmcache {

using RespDeadline = std::chrono::steady_clock::time_point;

// A connection that cannot be used any more, or could not be made. `error` is an errno: ETIMEDOUT, ECANCELED (stop),
// ECONNRESET, EPROTO (not the protocol), EACCES (refused by TLS or by the server's access rules) ...
class RespFault : public std::runtime_error {
public:
    RespFault(int number, const std::string& sentence) : std::runtime_error(sentence), error(number) {}
    const int error;
};

// `host` that begins with "/" is the path of a Unix socket.
struct RespAddress {
    std::string host;
    std::uint16_t port = 0;

    bool is_path() const { return host.starts_with('/'); }
    std::string text() const { return is_path() ? host : host + ":" + std::to_string(port); }
    bool operator==(const RespAddress&) const = default;
};

// One thread at a time. After a RespFault the stream is of no more use.
class RespStream {
public:
    static constexpr std::size_t kMaxLineBytes = 16 << 10;  // shorter than the read buffer

    // Connects; `tls` may be nullptr. `stop_fd` that becomes readable ends every wait. Throws RespFault.
    RespStream(const RespAddress& address, const TlsContext* tls, int stop_fd, RespDeadline deadline);
    ~RespStream();
    RespStream(const RespStream&) = delete;
    RespStream& operator=(const RespStream&) = delete;

    // All of the parts, which are changed.
    void write(std::span<iovec> parts, RespDeadline deadline);

    // A line without its CR LF, valid until the next call. A longer one than kMaxLineBytes is a fault.
    std::string_view read_line(RespDeadline deadline);

    // Exactly that many bytes, beyond what is buffered straight into `memory`.
    void read(std::byte* memory, std::uint64_t bytes, RespDeadline deadline);
    void skip(std::uint64_t bytes, RespDeadline deadline);

    bool has_buffered() const { return begin_ != end_; }

private:
    static constexpr std::size_t kBufferBytes = 32 << 10;

    struct Step {
        std::size_t bytes = 0;
        short wait = 0;  // POLLIN or POLLOUT: nothing moved, this has to be waited for
    };

    void connect(const RespAddress& address, RespDeadline deadline);
    void start_tls(const RespAddress& address, RespDeadline deadline);
    void wait(short events, RespDeadline deadline);
    void wake_at(std::uint64_t bytes);
    Step receive(std::byte* memory, std::size_t bytes);
    Step send(std::span<const iovec> parts);
    Step tls_step(int result, const char* act);
    std::size_t receive_some(std::byte* memory, std::size_t bytes, RespDeadline deadline);
    void fill(RespDeadline deadline);

    const TlsContext* const tls_;
    const int stop_fd_;
    UniqueFd socket_;
    TlsSessionHandle session_ = nullptr;
    std::unique_ptr<std::byte[]> buffer_;
    std::size_t begin_ = 0, end_ = 0;  // what of the buffer is not yet read
    int woken_at_ = 1;
};

}  // namespace lmcache
