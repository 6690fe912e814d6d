// CRC-32C, and the payload checksum made of four of them (docs/formats/frame.md).
//
// The payload is a sequence of 8-byte words, the last one padded with zero bytes. Word w belongs to lane w % 4. A lane
// is the CRC-32C of its words in order; the checksum is the four lanes as little-endian u32, lane 0 first. Four
// independent chains hide the latency of the CRC instruction, which one chain over all bytes cannot.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace lmcache {

inline constexpr std::size_t kChecksumLanes = 4;
inline constexpr std::size_t kChecksumBytes = 16;
using PayloadChecksum = std::array<std::uint8_t, kChecksumBytes>;

// The checksum of a payload that arrives in runs of any length. Kernels (copy.h) advance it.
// Invariant: pending_bytes < 8, and the bytes of `pending` beyond them are zero.
struct LaneChecksum {
    std::uint32_t lanes[kChecksumLanes] = {~0U, ~0U, ~0U, ~0U};  // registers, not yet inverted
    std::uint32_t next_lane = 0;                                 // takes the next whole word
    std::uint32_t pending_bytes = 0;                             // of a word begun by the last run
    std::uint64_t pending = 0;                                   // those bytes, little-endian

    // Ends the payload. The object must not be advanced afterwards.
    PayloadChecksum finish();
};

// CRC-32C (Castagnoli, reflected, initial value and final xor all ones) of the bytes, with the CPU's instruction if
// any.
std::uint32_t crc32c(std::span<const std::byte> bytes);

// One step of a CRC register (not inverted) over 8 bytes, by table. What every kernel must agree with.
std::uint32_t crc32c_word_portable(std::uint32_t crc, std::uint64_t word);
std::uint32_t crc32c_byte_portable(std::uint32_t crc, std::uint8_t byte);

}  // namespace lmcache
