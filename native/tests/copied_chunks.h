// What the tests of copiers copy: chunk i of KV memory, with hash i, in slot i and blocks i * kBlocksPerChunk on.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "aligned_memory.h"
#include "lmcache/frame.h"
#include "lmcache/paged_copier.h"

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

// An arena, KV memory of kLayers, and a copier over both that a test adds with its group.
template <std::size_t kBlockBytes>
struct CopierFixture {
    static constexpr double kPatience = 90.0;  // seconds; only ever reached by a bug
    static constexpr std::size_t kPayload = kLayers * kBlocksPerChunk * kBlockBytes;
    static constexpr std::size_t kFrame = lmcache::kFrameHeaderBytes + kPayload;
    static constexpr std::size_t kArena = kSlots * kFrame;
    using Results = lmcache::PagedCopier::Results;
    using JobId = lmcache::PagedCopier::JobId;

    const Memory memory{kArena};
    std::byte* const arena = reinterpret_cast<std::byte*>(memory.data);
    std::vector<std::byte> kv = std::vector<std::byte>(kLayers * kNumBlocks * kBlockBytes);
    const lmcache::FrameHeader header = lmcache::frame_template({}, kDigest, kPayload, "", {});
    std::unique_ptr<lmcache::PagedCopier> copier;
    std::size_t group = 0;

    CopierFixture() { fill(0); }

    static std::uintptr_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }
    static std::vector<std::uint64_t> slots(std::size_t first, std::size_t count) {
        return slots_from(first, count, kFrame);
    }
    void fill(unsigned seed) {
        for (std::size_t i = 0; i < kv.size(); ++i) kv[i] = static_cast<std::byte>((i + seed) * 7 + i / 4099 + seed);
    }
    std::vector<lmcache::Segment> segments(std::size_t layer_stride, std::ptrdiff_t block_stride) const {
        std::vector<lmcache::Segment> layers;
        for (std::size_t layer = 0; layer < kLayers; ++layer)
            layers.push_back({address(kv.data()) + layer * layer_stride, block_stride, kBlockBytes, {}});
        return layers;
    }

    JobId submit_store(std::size_t first, std::size_t count) {
        return copier->submit_store(group, slots(first, count), blocks_from(first, count), hashes_from(first, count),
                                    as_bytes(header));
    }
    JobId submit_load(std::size_t first, std::size_t count, std::shared_ptr<lmcache::CudaFence> fence = nullptr) {
        return copier->submit_load(group, slots(first, count), blocks_from(first, count), hashes_from(first, count),
                                   kDigest, std::move(fence));
    }
    Results store(std::size_t first, std::size_t count) { return *copier->wait(submit_store(first, count), kPatience); }
    Results load(std::size_t first, std::size_t count) { return *copier->wait(submit_load(first, count), kPatience); }
    lmcache::FrameFault verdict(std::size_t slot) const {
        const auto hash = hashes_from(slot, 1);
        return lmcache::frame_verify(arena + slot * kFrame, kFrame, std::span<const std::byte, 32>(kDigest),
                                     std::span<const std::byte, 32>(hash));
    }
};
