// Whole frames between the memory of two servers over a socket. Each call moves a batch, ends at its deadline, and is
// ended early by shutdown(2) of the socket.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lmcache/frame.h"

namespace lmcache {

// `total_seconds`: of the whole call. `idle_seconds`: without a single byte.
struct StreamLimits {
    double total_seconds = 0;
    double idle_seconds = 0;
};

// Where frames lie, and what they are: element for element, digests and hashes 32 bytes each.
struct FrameBatch {
    std::span<const std::uint64_t> addresses, sizes;
    std::span<const std::byte> namespace_digests, chunk_hashes;

    // std::invalid_argument when the arrays do not fit each other, or a size is no frame's.
    void check() const;
    std::size_t count() const { return addresses.size(); }
    std::byte* memory(std::size_t i) const { return reinterpret_cast<std::byte*>(addresses[i]); }
    std::span<const std::byte, kDigestBytes> digest(std::size_t i) const {
        return namespace_digests.subspan(i * kDigestBytes).first<kDigestBytes>();
    }
    std::span<const std::byte, kChunkHashBytes> hash(std::size_t i) const {
        return chunk_hashes.subspan(i * kChunkHashBytes).first<kChunkHashBytes>();
    }
};

// Sends `head`, then the ranges one behind the other. 0, or an errno: ETIMEDOUT at a limit, EPIPE after shutdown(2).
int send_ranges(int socket, std::span<const std::byte> head, std::span<const std::uint64_t> addresses,
                std::span<const std::uint64_t> sizes, const StreamLimits& limits);

// Exactly that many bytes. 0, or an errno: ETIMEDOUT at a limit, ECONNRESET when the other side has closed.
int receive_bytes(int socket, std::span<std::byte> memory, const StreamLimits& limits);

// A request, and the message that answers it: `header_bytes`, whose last four say (u32, little-endian) how many bytes
// follow, and these. Of one with more than `most_bytes` behind its header only the header is received.
struct Answer {
    std::vector<std::byte> message;
    int error = 0;  // as of `receive_bytes`; then nothing of the message counts
};
Answer exchange(int socket, std::span<const std::byte> request, std::size_t header_bytes, std::size_t most_bytes,
                const StreamLimits& limits);

struct ReceivedFrames {
    std::vector<FrameFault> faults;  // of those that came whole
    int error = 0;                   // an errno; then faults.size() frames came, and the next one may have begun to
};

// Receives frames that come one behind the other, each exactly as long as its size says, and verifies each while it
// arrives. A frame that does not verify is received all the same: the stream goes on behind it.
ReceivedFrames receive_frames(int socket, const FrameBatch& frames, const StreamLimits& limits);

// The size of the frame in each slot at `memory`, a multiple of 4096; 0 for a kNoSlot, and where it would go beyond
// `memory_bytes`. The slots must be leased.
std::vector<std::uint64_t> frame_sizes(const std::byte* memory, std::size_t memory_bytes,
                                       std::span<const std::uint64_t> slots);

}  // namespace lmcache
