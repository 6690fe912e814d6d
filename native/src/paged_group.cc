#include "lmcache/paged_group.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "lmcache/limits.h"

namespace lmcache {
namespace {

// Product of two sizes that must stay within an object; throws beyond it, so that no later sum can overflow.
std::size_t bounded_product(std::size_t a, std::size_t b) {
    std::size_t product;
    if (__builtin_mul_overflow(a, b, &product) || product > kMaxObjectBytes) {
        throw std::invalid_argument("a chunk of this group would be larger than " + std::to_string(kMaxObjectBytes) +
                                    " bytes");
    }
    return product;
}

}  // namespace

PagedGroup::Walk PagedGroup::simplify(const Segment& segment) {
    if (segment.base == 0) throw std::invalid_argument("segment: the base address must not be 0");
    if (segment.run_bytes == 0) throw std::invalid_argument("segment: run bytes must be at least 1");
    if (segment.dims.size() > kMaxSegmentDims) {
        throw std::invalid_argument("segment: more than " + std::to_string(kMaxSegmentDims) + " dimensions");
    }
    Walk walk{segment.base, segment.block_stride_bytes, segment.run_bytes, {1, 0}, {}, segment.run_bytes};
    std::vector<StridedDim> dims;
    for (const StridedDim& dim : segment.dims) {
        if (dim.count == 0) throw std::invalid_argument("segment: a dimension's count must be at least 1");
        walk.content_bytes = bounded_product(walk.content_bytes, dim.count);
        if (dim.count > 1) dims.push_back(dim);
    }
    while (!dims.empty() && dims.back().stride_bytes == static_cast<std::ptrdiff_t>(walk.run_bytes)) {
        walk.run_bytes *= dims.back().count;
        dims.pop_back();
    }
    if (!dims.empty()) {
        walk.inner = dims.back();
        dims.pop_back();
    }
    // An outer dimension that continues where the inner one ends makes it longer.
    while (!dims.empty() &&
           dims.back().stride_bytes == walk.inner.stride_bytes * static_cast<std::ptrdiff_t>(walk.inner.count)) {
        walk.inner.count *= dims.back().count;
        dims.pop_back();
    }
    walk.outer = std::move(dims);
    return walk;
}

PagedGroup::PagedGroup(std::vector<Segment> segments, std::size_t blocks_per_chunk, std::size_t num_blocks)
    : blocks_per_chunk_(blocks_per_chunk), num_blocks_(num_blocks) {
    if (segments.empty()) throw std::invalid_argument("a group needs at least one segment");
    if (blocks_per_chunk == 0) throw std::invalid_argument("blocks_per_chunk must be at least 1");
    if (num_blocks == 0) throw std::invalid_argument("num_blocks must be at least 1");
    std::size_t block_bytes = 0;
    for (const Segment& segment : segments) {
        walks_.push_back(simplify(segment));
        block_bytes += walks_.back().content_bytes;
        payload_bytes_ = bounded_product(block_bytes, blocks_per_chunk);
    }
}

void PagedGroup::gather(const CopyKernels& kernels, std::byte* payload, std::span<const std::int64_t> blocks,
                        LaneChecksum& checksum, StoreKind kind) const {
    // One row behind, so that each copy knows where the next begins.
    Runs row{};
    for (const Walk& walk : walks_) {
        for (const std::int64_t id : blocks) {
            const std::uintptr_t block = walk.base + static_cast<std::uintptr_t>(id * walk.block_stride_bytes);
            for_each_row(walk, block, [&](std::uintptr_t at) {
                const auto* const source = reinterpret_cast<const std::byte*>(at);
                row.next_source = source;
                if (row.count != 0) kernels.copy_runs(row, checksum, kind);
                row = {.source = source,
                       .destination = payload,
                       .run_bytes = walk.run_bytes,
                       .count = walk.inner.count,
                       .source_stride = walk.inner.stride_bytes,
                       .destination_stride = static_cast<std::ptrdiff_t>(walk.run_bytes)};
                payload += walk.run_bytes * walk.inner.count;
            });
        }
    }
    kernels.copy_runs(row, checksum, kind);
}

void PagedGroup::scatter(const CopyKernels& kernels, const std::byte* payload, std::span<const std::int64_t> blocks,
                         LaneChecksum& checksum, StoreKind kind) const {
    for (const Walk& walk : walks_) {
        const std::size_t row_bytes = walk.run_bytes * walk.inner.count;
        for (const std::int64_t id : blocks) {
            if (id == kNoBlock) {
                kernels.copy_runs({.source = payload,
                                   .run_bytes = walk.content_bytes,
                                   .count = 1,
                                   .next_source = payload + walk.content_bytes},
                                  checksum, StoreKind::kChecksumOnly);
                payload += walk.content_bytes;
                continue;
            }
            const std::uintptr_t block = walk.base + static_cast<std::uintptr_t>(id * walk.block_stride_bytes);
            for_each_row(walk, block, [&](std::uintptr_t at) {
                kernels.copy_runs({.source = payload,
                                   .destination = reinterpret_cast<std::byte*>(at),
                                   .run_bytes = walk.run_bytes,
                                   .count = walk.inner.count,
                                   .source_stride = static_cast<std::ptrdiff_t>(walk.run_bytes),
                                   .destination_stride = walk.inner.stride_bytes,
                                   .next_source = payload + row_bytes},
                                  checksum, kind);
                payload += row_bytes;
            });
        }
    }
}

}  // namespace lmcache
