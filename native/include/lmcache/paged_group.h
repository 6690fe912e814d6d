// Where the blocks of one KV cache group lie, and the walk over them that makes an object's payload.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lmcache/checksum.h"
#include "lmcache/copy.h"
#include "lmcache/limits.h"

namespace lmcache {

struct StridedDim {
    std::size_t count;
    std::ptrdiff_t stride_bytes;
};

// One KV tensor. The content of block b: runs of `run_bytes` that start at base + b * block_stride_bytes, for each
// position in the outer dimensions `dims`, the first dimension slowest.
struct Segment {
    std::uintptr_t base;
    std::ptrdiff_t block_stride_bytes;
    std::size_t run_bytes;
    std::vector<StridedDim> dims;
};

inline constexpr std::int64_t kNoBlock = -1;

// The payload of a chunk is, for each segment in order, for each of its blocks in order, the block's content.
class PagedGroup {
public:
    // Throws std::invalid_argument for empty, negative or too large descriptions.
    PagedGroup(std::vector<Segment> segments, std::size_t blocks_per_chunk, std::size_t num_blocks);

    std::size_t payload_bytes() const { return payload_bytes_; }
    std::size_t blocks_per_chunk() const { return blocks_per_chunk_; }
    std::size_t num_blocks() const { return num_blocks_; }

    // blocks -> payload, advancing `checksum` over it. `blocks` has blocks_per_chunk valid ids.
    void gather(const CopyKernels& kernels, std::byte* payload, std::span<const std::int64_t> blocks,
                LaneChecksum& checksum, StoreKind kind) const;

    // payload -> blocks. The part of a block whose id is kNoBlock goes into the checksum only.
    void scatter(const CopyKernels& kernels, const std::byte* payload, std::span<const std::int64_t> blocks,
                 LaneChecksum& checksum, StoreKind kind) const;

    // The contiguous pieces that a chunk's payload is made of, without those of kNoBlock; pieces that lie one behind
    // the other on both sides are one. visit(address, offset in the payload, size in bytes).
    template <class Visit>
    void for_each_run(std::span<const std::int64_t> blocks, Visit&& visit) const {
        std::uintptr_t begin = 0;
        std::size_t begin_offset = 0;
        std::size_t size_bytes = 0;
        std::size_t offset = 0;
        for (const Walk& walk : walks_) {
            for (const std::int64_t id : blocks) {
                if (id == kNoBlock) {
                    offset += walk.content_bytes;
                    continue;
                }
                const std::uintptr_t block = walk.base + static_cast<std::uintptr_t>(id * walk.block_stride_bytes);
                for_each_row(walk, block, [&](std::uintptr_t row) {
                    for (std::size_t i = 0; i < walk.inner.count; ++i) {
                        const std::uintptr_t at = row + i * static_cast<std::uintptr_t>(walk.inner.stride_bytes);
                        if (size_bytes != 0 && (at != begin + size_bytes || offset != begin_offset + size_bytes)) {
                            visit(begin, begin_offset, size_bytes);
                            size_bytes = 0;
                        }
                        if (size_bytes == 0) {
                            begin = at;
                            begin_offset = offset;
                        }
                        size_bytes += walk.run_bytes;
                        offset += walk.run_bytes;
                    }
                });
            }
        }
        if (size_bytes != 0) visit(begin, begin_offset, size_bytes);
    }

private:
    // A segment in its simplest equal form: contiguous dimensions merged into the run, the innermost dimension apart.
    struct Walk {
        std::uintptr_t base;
        std::ptrdiff_t block_stride_bytes;
        std::size_t run_bytes;
        StridedDim inner;
        std::vector<StridedDim> outer;
        std::size_t content_bytes;
    };
    static Walk simplify(const Segment& segment);
    template <class Visit>
    static void for_each_row(const Walk& walk, std::uintptr_t block, Visit&& visit);

    std::vector<Walk> walks_;
    std::size_t blocks_per_chunk_;
    std::size_t num_blocks_;
    std::size_t payload_bytes_ = 0;
};

template <class Visit>
void PagedGroup::for_each_row(const Walk& walk, std::uintptr_t block, Visit&& visit) {
    if (walk.outer.empty()) return visit(block);
    std::size_t position[kMaxSegmentDims] = {};
    std::uintptr_t row = block;
    while (true) {
        visit(row);
        std::size_t dim = walk.outer.size();
        while (true) {
            if (dim == 0) return;
            --dim;
            row += static_cast<std::uintptr_t>(walk.outer[dim].stride_bytes);
            if (++position[dim] < walk.outer[dim].count) break;
            row -= static_cast<std::uintptr_t>(walk.outer[dim].stride_bytes) * walk.outer[dim].count;
            position[dim] = 0;
        }
    }
}

}  // namespace lmcache
