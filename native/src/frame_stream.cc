#include "lmcache/frame_stream.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "lmcache/copy.h"
#include "lmcache/rounding.h"

namespace lmcache {
namespace {

constexpr std::size_t kMaxParts = 64;           // of one system call
constexpr std::size_t kPieceBytes = 512 << 10;  // received at a time: small enough to be verified out of the cache

// When a call has to end, and when it has to have moved a byte.
class Deadline {
public:
    using Clock = std::chrono::steady_clock;

    explicit Deadline(const StreamLimits& limits)
        : end_(Clock::now() + seconds(limits.total_seconds)), idle_(seconds(limits.idle_seconds)) {
        moved();
    }

    void moved() { idle_end_ = Clock::now() + idle_; }

    // Until the socket is ready. 0, or ETIMEDOUT or another errno.
    int wait(int socket, short events) const {
        for (;;) {
            const auto left =
                std::chrono::duration_cast<std::chrono::milliseconds>(std::min(end_, idle_end_) - Clock::now());
            if (left.count() <= 0) return ETIMEDOUT;
            pollfd ready{socket, events, 0};
            const int milliseconds = static_cast<int>(std::min<long long>(left.count() + 1, 1 << 20));
            const int found = ::poll(&ready, 1, milliseconds);
            if (found > 0) return 0;
            if (found < 0 && errno != EINTR) return errno;
        }
    }

    bool is_over() const { return Clock::now() >= end_; }

private:
    static Clock::duration seconds(double seconds) {
        const double bounded = std::isfinite(seconds) ? std::clamp(seconds, 0.0, 1e6) : 1e6;
        return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded));
    }

    const Clock::time_point end_;
    const Clock::duration idle_;
    Clock::time_point idle_end_;
};

bool is_temporary(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

// One frame that is arriving.
class ArrivingFrame {
public:
    ArrivingFrame(const FrameBatch& frames, std::size_t index) : frames_(frames), index_(index) {}

    // `end` bytes of it are there.
    void advance(std::uint64_t end) {
        if (!header_seen_ && end >= kFrameHeaderBytes) read_header();
        if (!header_seen_ || fault_ != FrameFault::kNone) return;
        const std::uint64_t payload_end = kFrameHeaderBytes + payload_bytes_;
        const std::uint64_t to = std::min(end, payload_end);
        if (to > summed_) {
            best_copy_kernels().copy_runs({.source = frames_.memory(index_) + summed_,
                                           .run_bytes = static_cast<std::size_t>(to - summed_),
                                           .count = 1},
                                          sum_, StoreKind::kChecksumOnly);
            summed_ = to;
        }
    }

    // When all of it is there.
    FrameFault finish() {
        if (fault_ != FrameFault::kNone) return fault_;
        const PayloadChecksum found = sum_.finish();
        return std::memcmp(found.data(), checksum_, kChecksumBytes) == 0 ? FrameFault::kNone
                                                                         : FrameFault::kPayloadChecksum;
    }

private:
    void read_header() {
        FrameHeader header;
        std::memcpy(&header, frames_.memory(index_), sizeof header);
        header_seen_ = true;
        fault_ = frame_check_header(header, frames_.sizes[index_] - kFrameHeaderBytes, frames_.digest(index_),
                                    frames_.hash(index_));
        payload_bytes_ = header.payload_bytes;
        std::memcpy(checksum_, header.payload_checksum, kChecksumBytes);
    }

    const FrameBatch& frames_;
    const std::size_t index_;
    bool header_seen_ = false;
    FrameFault fault_ = FrameFault::kNone;
    std::uint64_t payload_bytes_ = 0;
    std::uint64_t summed_ = kFrameHeaderBytes;
    std::uint8_t checksum_[kChecksumBytes] = {};
    LaneChecksum sum_;
};

// Woken for each segment, a thread would spend as much time on that as on copying.
class LowWaterMark {
public:
    explicit LowWaterMark(int socket) : socket_(socket) {}
    LowWaterMark(const LowWaterMark&) = delete;
    LowWaterMark& operator=(const LowWaterMark&) = delete;
    ~LowWaterMark() { set(1); }

    void set(std::uint64_t bytes) {
        const int wanted = static_cast<int>(std::min<std::uint64_t>(std::max<std::uint64_t>(bytes, 1), kPieceBytes));
        if (wanted != mark_ && ::setsockopt(socket_, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted) == 0)
            mark_ = wanted;
    }

private:
    const int socket_;
    int mark_ = 1;
};

// The ranges from `done` bytes into range `index` on, as many as one call takes.
std::size_t fill_parts(std::array<iovec, kMaxParts>& parts, std::span<const std::uint64_t> addresses,
                       std::span<const std::uint64_t> sizes, std::size_t index, std::uint64_t done,
                       std::uint64_t most_bytes) {
    std::size_t count = 0;
    while (count < kMaxParts && index < sizes.size() && most_bytes != 0) {
        const std::uint64_t bytes = std::min(sizes[index] - done, most_bytes);
        if (bytes != 0) parts[count++] = {reinterpret_cast<void*>(addresses[index] + done), bytes};
        most_bytes -= bytes;
        done = 0;
        ++index;
    }
    return count;
}

}  // namespace

void FrameBatch::check() const {
    if (sizes.size() != count()) throw std::invalid_argument("there must be a size for each address");
    if (namespace_digests.size() != kDigestBytes * count() || chunk_hashes.size() != kChunkHashBytes * count())
        throw std::invalid_argument("there must be a digest and a hash of 32 bytes for each address");
    for (const std::uint64_t size : sizes)
        if (size <= kFrameHeaderBytes) throw std::invalid_argument("a frame has more than 4096 bytes");
}

int send_ranges(int socket, std::span<const std::byte> head, std::span<const std::uint64_t> addresses,
                std::span<const std::uint64_t> sizes, const StreamLimits& limits) {
    if (sizes.size() != addresses.size()) throw std::invalid_argument("there must be a size for each address");
    std::vector<std::uint64_t> all_addresses{reinterpret_cast<std::uint64_t>(head.data())}, all_sizes{head.size()};
    all_addresses.insert(all_addresses.end(), addresses.begin(), addresses.end());
    all_sizes.insert(all_sizes.end(), sizes.begin(), sizes.end());
    Deadline deadline(limits);
    std::array<iovec, kMaxParts> parts;
    std::size_t index = 0;
    std::uint64_t done = 0;
    for (;;) {
        while (index < all_sizes.size() && done == all_sizes[index]) {
            ++index;
            done = 0;
        }
        if (index == all_sizes.size()) return 0;
        msghdr message{};
        message.msg_iov = parts.data();
        message.msg_iovlen = fill_parts(parts, all_addresses, all_sizes, index, done, ~std::uint64_t{0});
        const ssize_t sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) {
            if (!is_temporary(errno)) return errno;
            if (const int error = deadline.wait(socket, POLLOUT); error != 0) return error;
            continue;
        }
        if (deadline.is_over()) return ETIMEDOUT;
        deadline.moved();
        for (std::uint64_t left = static_cast<std::uint64_t>(sent); left != 0;) {
            const std::uint64_t step = std::min(left, all_sizes[index] - done);
            done += step;
            left -= step;
            if (done == all_sizes[index]) {
                ++index;
                done = 0;
            }
        }
    }
}

int receive_bytes(int socket, std::span<std::byte> memory, const StreamLimits& limits) {
    Deadline deadline(limits);
    while (!memory.empty()) {
        const ssize_t came = ::recv(socket, memory.data(), memory.size(), MSG_DONTWAIT);
        if (came == 0) return ECONNRESET;
        if (came < 0) {
            if (!is_temporary(errno)) return errno;
            if (const int error = deadline.wait(socket, POLLIN); error != 0) return error;
            continue;
        }
        if (deadline.is_over()) return ETIMEDOUT;
        deadline.moved();
        memory = memory.subspan(static_cast<std::size_t>(came));
    }
    return 0;
}

Answer exchange(int socket, std::span<const std::byte> request, std::size_t header_bytes, std::size_t most_bytes,
                const StreamLimits& limits) {
    std::uint32_t body_bytes = 0;
    if (header_bytes < sizeof body_bytes) throw std::invalid_argument("a header ends with a number of four bytes");
    Answer answer;
    const auto began = Deadline::Clock::now();
    const auto left = [&] {  // of the time that all steps have together
        const std::chrono::duration<double> passed = Deadline::Clock::now() - began;
        return StreamLimits{limits.total_seconds - passed.count(), limits.idle_seconds};
    };
    if (answer.error = send_ranges(socket, request, {}, {}, left()); answer.error != 0) return answer;
    answer.message.resize(header_bytes);
    if (answer.error = receive_bytes(socket, answer.message, left()); answer.error != 0) return answer;
    std::memcpy(&body_bytes, answer.message.data() + header_bytes - sizeof body_bytes, sizeof body_bytes);
    if (body_bytes > most_bytes) return answer;
    answer.message.resize(header_bytes + body_bytes);
    answer.error = receive_bytes(socket, std::span(answer.message).subspan(header_bytes), left());
    return answer;
}

ReceivedFrames receive_frames(int socket, const FrameBatch& frames, const StreamLimits& limits) {
    frames.check();
    ReceivedFrames received;
    received.faults.reserve(frames.count());
    Deadline deadline(limits);
    LowWaterMark mark(socket);
    std::array<iovec, kMaxParts> parts;
    std::uint64_t left_bytes = 0;
    for (const std::uint64_t size : frames.sizes) left_bytes += size;
    std::uint64_t done = 0;
    for (std::size_t index = 0; index < frames.count();) {
        ArrivingFrame frame(frames, index);
        while (done < frames.sizes[index]) {
            msghdr message{};
            message.msg_iov = parts.data();
            message.msg_iovlen = fill_parts(parts, frames.addresses, frames.sizes, index, done, kPieceBytes);
            const ssize_t came = ::recvmsg(socket, &message, MSG_DONTWAIT);
            if (came == 0) {
                received.error = ECONNRESET;
                return received;
            }
            if (came < 0) {
                if (!is_temporary(errno)) {
                    received.error = errno;
                    return received;
                }
                mark.set(left_bytes);
                if (const int error = deadline.wait(socket, POLLIN); error != 0) {
                    char byte;  // fewer bytes than the mark may have come
                    if (error == ETIMEDOUT && !deadline.is_over() &&
                        ::recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0)
                        continue;
                    received.error = error;
                    return received;
                }
                continue;
            }
            if (deadline.is_over()) {
                received.error = ETIMEDOUT;
                return received;
            }
            deadline.moved();
            done += static_cast<std::uint64_t>(came);
            left_bytes -= static_cast<std::uint64_t>(came);
            frame.advance(std::min(done, frames.sizes[index]));
        }
        received.faults.push_back(frame.finish());
        done -= frames.sizes[index];
        ++index;
        // What came of the frames behind it.
        while (index < frames.count() && done >= frames.sizes[index]) {
            ArrivingFrame whole(frames, index);
            whole.advance(frames.sizes[index]);
            received.faults.push_back(whole.finish());
            done -= frames.sizes[index];
            ++index;
        }
    }
    return received;
}

std::vector<std::uint64_t> frame_sizes(const std::byte* memory, std::size_t memory_bytes,
                                       std::span<const std::uint64_t> slots) {
    std::vector<std::uint64_t> sizes(slots.size(), 0);
    for (std::size_t i = 0; i < slots.size(); ++i) {
        if (slots[i] >= memory_bytes || memory_bytes - slots[i] < kFrameHeaderBytes) continue;  // kNoSlot too
        std::uint64_t payload_bytes;
        std::memcpy(&payload_bytes, memory + slots[i] + offsetof(FrameHeader, payload_bytes), sizeof payload_bytes);
        const std::uint64_t room = memory_bytes - slots[i] - kFrameHeaderBytes;
        if (payload_bytes == 0 || payload_bytes > std::min<std::uint64_t>(room, kMaxObjectBytes)) continue;
        const std::uint64_t size = round_up(kFrameHeaderBytes + payload_bytes, std::uint64_t{4096});
        if (size <= memory_bytes - slots[i]) sizes[i] = size;
    }
    return sizes;
}

}  // namespace lmcache
