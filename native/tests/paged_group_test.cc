// Gather and scatter over every kind of layout, against a walk that copies byte runs one by one.
#include "lmcache/paged_group.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "lmcache/frame.h"

using namespace lmcache;

namespace {

std::mt19937 g_random(20);

std::size_t below(std::size_t limit) { return g_random() % limit; }

// One KV tensor: blocks of dims x run, with gaps, in memory of its own.
struct Tensor {
    std::vector<std::byte> memory;
    Segment segment;

    Tensor(const Tensor&) = delete;  // `segment` points into `memory`
    Tensor(Tensor&&) = default;
    Tensor(std::size_t num_blocks, std::size_t run_bytes, const std::vector<std::size_t>& counts, std::size_t gap_bytes,
           std::size_t offset) {
        segment.run_bytes = run_bytes;
        std::size_t stride = run_bytes + gap_bytes;
        for (std::size_t i = counts.size(); i-- > 0;) {
            segment.dims.insert(segment.dims.begin(), {counts[i], static_cast<std::ptrdiff_t>(stride)});
            stride = stride * counts[i] + gap_bytes;
        }
        segment.block_stride_bytes = static_cast<std::ptrdiff_t>(stride);
        memory.resize(offset + stride * num_blocks);
        for (std::byte& byte : memory) byte = static_cast<std::byte>(g_random());
        segment.base = reinterpret_cast<std::uintptr_t>(memory.data()) + offset;
    }
};

// Appends the addresses of every run of a block, in payload order.
void runs_of(const Segment& segment, std::uintptr_t at, std::size_t dim, std::vector<std::byte*>& runs) {
    if (dim == segment.dims.size()) {
        runs.push_back(reinterpret_cast<std::byte*>(at));
        return;
    }
    for (std::size_t i = 0; i < segment.dims[dim].count; ++i) {
        runs_of(segment, at + i * static_cast<std::size_t>(segment.dims[dim].stride_bytes), dim + 1, runs);
    }
}

std::vector<std::byte> payload_by_definition(const std::vector<Tensor>& tensors,
                                             const std::vector<std::int64_t>& blocks) {
    std::vector<std::byte> payload;
    for (const Tensor& tensor : tensors) {
        for (const std::int64_t id : blocks) {
            std::vector<std::byte*> runs;
            const auto block_at = static_cast<std::uintptr_t>(id * tensor.segment.block_stride_bytes);
            runs_of(tensor.segment, tensor.segment.base + block_at, 0, runs);
            for (const std::byte* run : runs) payload.insert(payload.end(), run, run + tensor.segment.run_bytes);
        }
    }
    return payload;
}

void there_and_back(std::vector<Tensor> tensors, std::size_t blocks_per_chunk, std::size_t num_blocks, StoreKind kind) {
    std::vector<Segment> segments;
    for (const Tensor& tensor : tensors) segments.push_back(tensor.segment);
    const PagedGroup group(segments, blocks_per_chunk, num_blocks);
    std::vector<std::int64_t> blocks(num_blocks);
    std::iota(blocks.begin(), blocks.end(), 0);
    std::shuffle(blocks.begin(), blocks.end(), g_random);
    blocks.resize(blocks_per_chunk);

    const std::vector<std::byte> expected = payload_by_definition(tensors, blocks);
    CHECK(group.payload_bytes() == expected.size());
    // Aligned as a slot is, and of exactly its size, so that a sanitizer sees every byte beyond it.
    std::vector<std::byte> memory(expected.size() + 64);
    std::byte* const payload = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
    LaneChecksum gathered;
    group.gather(best_copy_kernels(), payload, blocks, gathered, kind);
    store_fence();
    CHECK(std::equal(expected.begin(), expected.end(), payload));
    const PayloadChecksum checksum = gathered.finish();
    CHECK(checksum == payload_checksum(expected));

    // Back into other content; one block is verified only.
    const std::size_t left_out = below(blocks_per_chunk);
    std::vector<std::int64_t> targets = blocks;
    targets[left_out] = kNoBlock;
    for (Tensor& tensor : tensors) {
        for (std::byte& byte : tensor.memory) byte ^= std::byte{0xff};
    }
    std::vector<std::vector<std::byte>> expected_memory;
    for (const Tensor& tensor : tensors) expected_memory.push_back(tensor.memory);
    std::size_t at = 0;
    for (std::size_t t = 0; t < tensors.size(); ++t) {
        for (const std::int64_t id : targets) {
            std::vector<std::byte*> runs;
            const Segment& segment = tensors[t].segment;
            runs_of(
                segment,
                segment.base + static_cast<std::uintptr_t>(std::max<std::int64_t>(id, 0) * segment.block_stride_bytes),
                0, runs);
            for (const std::byte* run : runs) {
                const std::size_t offset = static_cast<std::size_t>(run - tensors[t].memory.data());
                if (id != kNoBlock)
                    std::memcpy(expected_memory[t].data() + offset, expected.data() + at, segment.run_bytes);
                at += segment.run_bytes;
            }
        }
    }
    LaneChecksum scattered;
    group.scatter(best_copy_kernels(), payload, targets, scattered, kind);
    store_fence();
    CHECK(scattered.finish() == checksum);
    for (std::size_t t = 0; t < tensors.size(); ++t) CHECK(tensors[t].memory == expected_memory[t]);
}

template <class... Tensors>
std::vector<Tensor> together(Tensors... tensors) {
    std::vector<Tensor> all;
    (all.push_back(std::move(tensors)), ...);
    return all;
}

TEST_CASE(layouts) {
    for (const StoreKind kind : {StoreKind::kStreaming, StoreKind::kCached}) {
        // Whole blocks one behind the other; with pages longer than their content; a run a token and head.
        there_and_back(together(Tensor(9, 4096, {}, 0, 0), Tensor(9, 4096, {}, 0, 0)), 4, 9, kind);
        there_and_back(together(Tensor(9, 268288, {}, 59392, 0)), 2, 9, kind);
        there_and_back(together(Tensor(5, 64, {2, 16, 4}, 64, 0), Tensor(5, 128, {4}, 0, 64)), 3, 5, kind);
        there_and_back(together(Tensor(5, 576, {16}, 0, 0)), 5, 5, kind);
        there_and_back(together(Tensor(6, 656, {3, 5}, 16, 8)), 2, 6, kind);
    }
    for (int round = 0; round < 200; ++round) {
        const std::size_t num_blocks = 1 + below(6);
        std::vector<Tensor> tensors;
        for (std::size_t t = 0; t < 1 + below(3); ++t) {
            std::vector<std::size_t> counts;
            for (std::size_t d = 0; d < below(4); ++d) counts.push_back(1 + below(4));
            const std::size_t run_bytes = below(2) == 0 ? 64 * (1 + below(20)) : 1 + below(300);
            tensors.emplace_back(num_blocks, run_bytes, counts, below(2) * (1 + below(100)), below(2) * below(70));
        }
        there_and_back(std::move(tensors), 1 + below(num_blocks), num_blocks,
                       below(2) == 0 ? StoreKind::kStreaming : StoreKind::kCached);
    }
}

bool refused(std::vector<Segment> segments, std::size_t blocks_per_chunk, std::size_t num_blocks) {
    return ::refused([&] { const PagedGroup group(std::move(segments), blocks_per_chunk, num_blocks); });
}

TEST_CASE(impossible_layouts_are_refused) {
    const Segment good{4096, 64, 64, {}};
    CHECK(!refused({good}, 1, 1));
    CHECK(refused({}, 1, 1));
    CHECK(refused({good}, 0, 1));
    CHECK(refused({good}, 1, 0));
    CHECK(refused({{0, 64, 64, {}}}, 1, 1));
    CHECK(refused({{4096, 64, 0, {}}}, 1, 1));
    CHECK(refused({{4096, 64, 64, {{0, 64}}}}, 1, 1));
    CHECK(refused({{4096, 64, 64, {{std::size_t{1} << 40, 64}, {std::size_t{1} << 40, 64}}}}, 1, 1));
    CHECK(refused({{4096, 64, 64, std::vector<StridedDim>(kMaxSegmentDims + 1, {1, 64})}}, 1, 1));
    CHECK(refused({good}, std::size_t{1} << 60, 1));
    CHECK(refused({{4096, 64, std::size_t{3} << 30, {}}, {4096, 64, std::size_t{3} << 30, {}}}, 1, 1));
}

}  // namespace
