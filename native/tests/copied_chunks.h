// What the tests of copiers copy: chunk i of KV memory, with hash i, in slot i and blocks i * kBlocksPerChunk on.
#pragma once

#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>
#include <vector>

#include "lmcache/frame.h"

constexpr std::size_t kBlocksPerChunk = 2;
constexpr std::size_t kNumBlocks = 32;
constexpr std::size_t kLayers = 2;
constexpr std::size_t kSlots = 16;

inline const std::vector<std::byte> kDigest(32, std::byte{1});

inline std::span<const std::byte> as_bytes(const lmcache::FrameHeader& header) {
    return {reinterpret_cast<const std::byte*>(&header), sizeof header};
}

inline std::vector<std::uint64_t> slots_from(std::size_t first, std::size_t count, std::size_t frame_bytes) {
    std::vector<std::uint64_t> offsets(count);
    for (std::size_t i = 0; i < count; ++i) offsets[i] = (first + i) * frame_bytes;
    return offsets;
}

inline std::vector<std::int64_t> blocks_from(std::size_t first, std::size_t count) {
    std::vector<std::int64_t> ids(count * kBlocksPerChunk);
    std::iota(ids.begin(), ids.end(), static_cast<std::int64_t>(first * kBlocksPerChunk));
    return ids;
}

inline std::vector<std::byte> hashes_from(std::size_t first, std::size_t count) {
    std::vector<std::byte> hashes(32 * count);
    for (std::size_t i = 0; i < count; ++i) std::memset(hashes.data() + 32 * i, static_cast<int>(first + i), 32);
    return hashes;
}
