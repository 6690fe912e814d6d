// BLAKE3 (unkeyed, 32 bytes of output), for one input or for many of equal length at once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace lmcache {

inline constexpr std::size_t kBlake3Bytes = 32;
inline constexpr std::size_t kBlake3ChunkBytes = 1024;
using Blake3Digest = std::array<std::uint8_t, kBlake3Bytes>;

Blake3Digest blake3(std::span<const std::byte> input);

// Digests of `count` inputs of `input_bytes` each that lie one behind the other; `digests` has 32 bytes an input.
// Inputs of at most one BLAKE3 chunk are hashed several at a time, side by side in vector registers.
void blake3_many(const std::byte* inputs, std::size_t input_bytes, std::size_t count, std::byte* digests);

// The same with a given number of inputs side by side (1, 4, 8 or 16; false if this CPU cannot). For tests and
// benchmarks.
bool blake3_many_by(std::size_t lanes, const std::byte* inputs, std::size_t input_bytes, std::size_t count,
                    std::byte* digests);

}  // namespace lmcache
