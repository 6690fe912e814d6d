#include "lmcache/frame_stream.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "lmcache/arena.h"
#include "lmcache/unique_fd.h"
#include "sealed_frames.h"

using namespace lmcache;

namespace {

constexpr StreamLimits kLong{30, 30};

struct Sockets {
    Sockets() {
        int pair[2];
        CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0);
        left = UniqueFd(pair[0]);
        right = UniqueFd(pair[1]);
    }
    UniqueFd left, right;
};

TEST_CASE(frames_arrive_as_they_were_sent) {
    Frames frames({1, 4096, 5000, 300'000, 2 << 20, 64, 65536});
    Sockets sockets;
    const std::vector<std::byte> head(100, std::byte{9});
    int sent = -1;
    std::thread sender([&] { sent = send_ranges(sockets.left.get(), head, frames.sources, frames.sizes, kLong); });
    std::vector<std::byte> got(head.size());
    CHECK(receive_bytes(sockets.right.get(), got, kLong) == 0);
    const ReceivedFrames received = receive_frames(sockets.right.get(), frames.batch(), kLong);
    sender.join();
    CHECK(sent == 0);
    CHECK(got == head);
    CHECK(received.error == 0);
    CHECK(received.faults == std::vector<FrameFault>(frames.sizes.size(), FrameFault::kNone));
    CHECK(frames.target == frames.source);
}

TEST_CASE(what_does_not_verify_is_told_and_the_others_count) {
    Frames frames({5000, 5000, 5000, 5000});
    frames.source[frames.offsets[1] + kFrameHeaderBytes + 4999] ^= std::byte{1};
    frames.source[frames.offsets[2] + 300] ^= std::byte{1};
    Sockets sockets;
    std::thread sender([&] { (void)send_ranges(sockets.left.get(), {}, frames.sources, frames.sizes, kLong); });
    const ReceivedFrames received = receive_frames(sockets.right.get(), frames.batch(), kLong);
    sender.join();
    CHECK(received.error == 0);
    CHECK(received.faults == std::vector<FrameFault>({FrameFault::kNone, FrameFault::kPayloadChecksum,
                                                      FrameFault::kHeaderChecksum, FrameFault::kNone}));
}

TEST_CASE(an_end_in_the_middle_leaves_what_came_whole) {
    Frames frames({5000, 5000, 5000});
    Sockets sockets;
    const std::size_t bytes = frames.offsets[2] + 100;
    CHECK(::send(sockets.left.get(), frames.source.data(), bytes, 0) == static_cast<ssize_t>(bytes));
    (void)sockets.left.close();
    const ReceivedFrames received = receive_frames(sockets.right.get(), frames.batch(), kLong);
    CHECK(received.error == ECONNRESET);
    CHECK(received.faults.size() == 2);
}

TEST_CASE(silence_ends_at_a_limit) {
    Frames frames({5000});
    Sockets sockets;
    CHECK(receive_frames(sockets.right.get(), frames.batch(), {30, 0.05}).error == ETIMEDOUT);
    CHECK(receive_frames(sockets.right.get(), frames.batch(), {0.05, 30}).error == ETIMEDOUT);
    CHECK(receive_frames(sockets.right.get(), frames.batch(), {0, 0}).error == ETIMEDOUT);
    std::vector<std::byte> some(10);
    CHECK(receive_bytes(sockets.right.get(), some, {30, 0.05}) == ETIMEDOUT);
    Frames large({8 << 20});
    CHECK(send_ranges(sockets.left.get(), {}, large.sources, large.sizes, {30, 0.05}) == ETIMEDOUT);
}

TEST_CASE(bytes_that_trickle_in_are_no_silence) {
    Frames frames({300'000});
    Sockets sockets;
    const std::size_t piece = frames.source.size() / 7;
    std::thread sender([&] {
        for (std::size_t at = 0; at < frames.source.size(); at += piece) {
            std::this_thread::sleep_for(std::chrono::milliseconds(400));
            const std::size_t size = std::min(piece, frames.source.size() - at);
            CHECK(::send(sockets.left.get(), frames.source.data() + at, size, 0) == static_cast<ssize_t>(size));
        }
    });
    const ReceivedFrames received = receive_frames(sockets.right.get(), frames.batch(), {30, 2});
    sender.join();
    CHECK(received.error == 0);
    CHECK(received.faults == std::vector<FrameFault>({FrameFault::kNone}));
}

TEST_CASE(shutdown_ends_both_directions) {
    Frames frames({8 << 20});
    Sockets sockets;
    int sent = 0;
    ReceivedFrames received;
    std::thread sender([&] { sent = send_ranges(sockets.left.get(), {}, frames.sources, frames.sizes, kLong); });
    ::shutdown(sockets.right.get(), SHUT_RDWR);
    sender.join();
    CHECK(sent == EPIPE || sent == ECONNRESET);
    std::thread receiver([&] { received = receive_frames(sockets.right.get(), frames.batch(), kLong); });
    receiver.join();
    CHECK(received.error == ECONNRESET);
    std::vector<std::byte> some(10);
    CHECK(receive_bytes(sockets.right.get(), some, kLong) == ECONNRESET);
}

TEST_CASE(sizes_are_those_of_the_headers) {
    Frames frames({5000, 70'000});
    std::vector<std::uint64_t> slots = frames.offsets;
    slots.push_back(kNoSlot);
    slots.push_back(frames.source.size() - 8);
    CHECK(frame_sizes(frames.source.data(), frames.source.size(), slots) ==
          std::vector<std::uint64_t>({frames.sizes[0], frames.sizes[1], 0, 0}));
    CHECK(frame_sizes(frames.source.data(), frames.offsets[1] + 8192, slots)[1] == 0);
}

TEST_CASE(a_request_is_answered_by_a_whole_message) {
    const auto answered = [](std::uint32_t body_bytes, std::size_t sent_bytes, std::size_t most_bytes) {
        Sockets sockets;
        std::vector<std::byte> message(16 + sent_bytes, std::byte{7});
        std::memcpy(&message[12], &body_bytes, sizeof body_bytes);
        std::vector<std::byte> request(50, std::byte{3}), got(request.size());
        std::thread other([&] {
            CHECK(receive_bytes(sockets.right.get(), got, kLong) == 0);
            CHECK(send_ranges(sockets.right.get(), message, {}, {}, kLong) == 0);
            sockets.right = UniqueFd();
        });
        Answer answer = exchange(sockets.left.get(), request, 16, most_bytes, kLong);
        other.join();
        CHECK(got == request);
        CHECK(answer.error != 0 || std::equal(answer.message.begin(), answer.message.end(), message.begin()));
        return answer;
    };
    CHECK(answered(0, 0, 100).message.size() == 16);
    CHECK(answered(100, 100, 100).message.size() == 116);
    CHECK(answered(101, 101, 100).message.size() == 16);
    CHECK(answered(100, 40, 100).error == ECONNRESET);
    Sockets sockets;
    CHECK(exchange(sockets.left.get(), {}, 16, 100, {30, 0.05}).error == ETIMEDOUT);
}

TEST_CASE(all_steps_of_a_request_have_one_deadline) {
    Sockets sockets;
    std::vector<std::byte> message(17, std::byte{0});
    message[12] = std::byte{1};  // the bytes of the body
    std::thread other([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(250));
        CHECK(send_ranges(sockets.right.get(), std::span(message).first(16), {}, {}, kLong) == 0);
        std::this_thread::sleep_for(std::chrono::milliseconds(250));
        CHECK(send_ranges(sockets.right.get(), std::span(message).last(1), {}, {}, kLong) == 0);
    });
    CHECK(exchange(sockets.left.get(), {}, 16, 100, {0.4, 30}).error == ETIMEDOUT);
    other.join();
}

TEST_CASE(arrays_that_do_not_fit_are_refused) {
    Frames frames({5000, 70'000});
    const std::vector<std::uint64_t> one{8192};
    CHECK(refused([&] { FrameBatch{frames.targets, one, frames.digests, frames.hashes}.check(); }));
    CHECK(refused([&] { FrameBatch{one, one, frames.digests, frames.hashes}.check(); }));
    CHECK(refused([&] { (void)send_ranges(0, {}, frames.targets, one, kLong); }));
}

}  // namespace
