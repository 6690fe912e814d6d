// Chunk hashes: each names a chunk of tokens and all before it (docs/formats/chunk_hash.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lmcache/limits.h"

namespace lmcache {

// Hashes of every full chunk in `tokens`, 32 bytes each:
//   digest_i = BLAKE3(tokens of chunk i as little-endian u32), hash_i = BLAKE3(hash_{i-1} || digest_i || extra_i)
// with hash_{-1} = parent. `extras` is empty or 32 bytes a full chunk; an all-zero extra is left out of the input.
// Throws std::invalid_argument when sizes do not fit.
std::vector<std::byte> hash_chunks(std::span<const std::uint32_t> tokens, std::size_t chunk_tokens,
                                   std::span<const std::byte> parent, std::span<const std::byte> extras);

// CBOR (RFC 8949) of each number, one after the other, in the shortest form; without the head of an array.
std::vector<std::byte> cbor_numbers(std::span<const std::uint32_t> numbers);

}  // namespace lmcache
