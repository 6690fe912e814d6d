// Every copy path of this CPU against a plain copy and the definition of the payload checksum.
#include "lmcache/copy.h"

#include <cstring>
#include <random>
#include <vector>

#include "check.h"

using namespace lmcache;

namespace {

constexpr const char* kPaths[] = {"clmul", "avx512", "avx2", "neon", "portable"};
constexpr StoreKind kKinds[] = {StoreKind::kStreaming, StoreKind::kCached, StoreKind::kChecksumOnly};
constexpr std::byte kUntouched{0xa5};

std::vector<std::byte> random_bytes(std::size_t size, unsigned seed) {
    std::mt19937 source(seed);
    std::vector<std::byte> bytes(size);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(source());
    return bytes;
}

// docs/formats/frame.md, word for word.
PayloadChecksum checksum_by_definition(std::vector<std::byte> payload) {
    payload.resize((payload.size() + 7) / 8 * 8);
    PayloadChecksum result;
    for (std::size_t lane = 0; lane < 4; ++lane) {
        std::vector<std::byte> words;
        for (std::size_t at = 8 * lane; at < payload.size(); at += 32) {
            words.insert(words.end(), payload.begin() + static_cast<std::ptrdiff_t>(at),
                         payload.begin() + static_cast<std::ptrdiff_t>(at + 8));
        }
        const std::uint32_t crc = crc32c(words);
        std::memcpy(result.data() + 4 * lane, &crc, 4);
    }
    return result;
}

struct Shape {
    std::size_t run_bytes;
    std::size_t count;
    std::ptrdiff_t source_stride;
    std::ptrdiff_t destination_stride;
    std::size_t source_offset;
    std::size_t destination_offset;
};

// The first run's offset in a buffer that holds all runs from `offset` on, also when they go backwards.
std::size_t first_at(std::size_t offset, std::size_t count, std::ptrdiff_t stride) {
    return stride >= 0 ? offset : offset + (count - 1) * static_cast<std::size_t>(-stride);
}

std::size_t extent(std::size_t offset, std::size_t count, std::ptrdiff_t stride, std::size_t run_bytes) {
    return offset + (count - 1) * static_cast<std::size_t>(stride < 0 ? -stride : stride) + run_bytes;
}

void copies_as_memcpy_does(const CopyKernels& kernels, StoreKind kind, const Shape& shape) {
    const auto source = random_bytes(extent(shape.source_offset, shape.count, shape.source_stride, shape.run_bytes), 7);
    std::vector<std::byte> found(
        extent(shape.destination_offset, shape.count, shape.destination_stride, shape.run_bytes) + 64, kUntouched);
    std::vector<std::byte> expected = found;
    std::vector<std::byte> payload;
    const std::byte* from = source.data() + first_at(shape.source_offset, shape.count, shape.source_stride);
    const std::size_t to = first_at(shape.destination_offset, shape.count, shape.destination_stride);
    for (std::size_t i = 0; i < shape.count; ++i) {
        const std::byte* const run = from + static_cast<std::ptrdiff_t>(i) * shape.source_stride;
        payload.insert(payload.end(), run, run + shape.run_bytes);
        std::byte* const target = expected.data() + to + static_cast<std::ptrdiff_t>(i) * shape.destination_stride;
        if (kind != StoreKind::kChecksumOnly) std::memcpy(target, run, shape.run_bytes);
    }
    LaneChecksum sum;
    kernels.copy_runs({.source = from,
                       .destination = kind == StoreKind::kChecksumOnly ? nullptr : found.data() + to,
                       .run_bytes = shape.run_bytes,
                       .count = shape.count,
                       .source_stride = shape.source_stride,
                       .destination_stride = shape.destination_stride,
                       .next_source = shape.count % 2 == 0 ? from : nullptr},
                      sum, kind);
    store_fence();
    CHECK(found == expected);
    CHECK(sum.finish() == checksum_by_definition(payload));
}

void every_shape(const CopyKernels& kernels) {
    for (const StoreKind kind : kKinds) {
        for (std::size_t size = 1; size < 200; ++size) {
            copies_as_memcpy_does(kernels, kind, {size, 1, 0, 0, size % 5, size % 3});
            copies_as_memcpy_does(kernels, kind, {size, 3, 256, 320, 0, 0});
            copies_as_memcpy_does(kernels, kind, {size, 4, 200, static_cast<std::ptrdiff_t>(size), 1, 0});
        }
        for (const std::size_t size : {1600, 3071, 3072, 3073, 3136, 6144, 70001}) {
            copies_as_memcpy_does(kernels, kind, {size, 1, 0, 0, 0, 0});
            copies_as_memcpy_does(kernels, kind, {size, 5, 70400, 70400, 64, 32});
            copies_as_memcpy_does(kernels, kind, {size, 2, -70400, 70464, 8, 0});
        }
        for (std::size_t size = 500; size < 1300; size += 7)
            copies_as_memcpy_does(kernels, kind, {size, 1, 0, 0, 1, 0});
        // Contiguous on both sides, so that the runs become one.
        copies_as_memcpy_does(kernels, kind, {64, 100, 64, 64, 0, 0});
        copies_as_memcpy_does(kernels, kind, {24, 100, 24, 24, 0, 0});
        // Many short runs: the prefetch reaches over several of them.
        copies_as_memcpy_does(kernels, kind, {64, 200, 192, 64, 0, 0});
        copies_as_memcpy_does(kernels, kind, {64, 200, 64, 192, 0, 0});
        copies_as_memcpy_does(kernels, kind, {128, 33, -128, 128, 0, 0});
        copies_as_memcpy_does(kernels, kind, {1, 77, 3, 2, 0, 0});
    }
}

// A payload cut into runs at random places has the checksum of the whole.
void runs_join(const CopyKernels& kernels) {
    std::mt19937 source(3);
    const auto payload = random_bytes(5000, 11);
    const PayloadChecksum expected = checksum_by_definition(payload);
    for (int round = 0; round < 300; ++round) {
        const bool copies = round % 3 != 2;  // or takes the checksum alone
        std::vector<std::byte> copy(payload.size());
        LaneChecksum sum;
        std::size_t at = 0;
        while (at < payload.size()) {
            const std::size_t limit = round % 3 == 0 ? 20 : round % 3 == 1 ? 500 : 4000;
            const std::size_t words = round % 2 == 0 ? 8 : 1;  // any byte, or between words
            const std::size_t size = std::min<std::size_t>(payload.size() - at, source() % limit / words * words);
            kernels.copy_runs(
                {.source = payload.data() + at, .destination = copy.data() + at, .run_bytes = size, .count = 1}, sum,
                copies ? kKinds[source() % 2] : StoreKind::kChecksumOnly);
            at += size;
        }
        store_fence();
        CHECK(!copies || copy == payload);
        CHECK(sum.finish() == expected);
    }
}

// Long runs that begin at any lane, between short ones.
void long_runs_join(const CopyKernels& kernels) {
    const auto payload = random_bytes(3 * 2048 + 256, 13);
    for (const StoreKind kind : kKinds) {
        for (std::size_t lane = 0; lane < 4; ++lane) {
            std::vector<std::byte> copy(payload.size());
            LaneChecksum sum;
            std::size_t at = 0;
            for (const std::size_t size : {8 * lane, std::size_t{2048}, std::size_t{8}, std::size_t{2304}}) {
                kernels.copy_runs({.source = payload.data() + at,
                                   .destination = copy.data() + at,
                                   .run_bytes = size,
                                   .count = 1,
                                   .next_source = payload.data() + at + size},
                                  sum, kind);
                at += size;
            }
            store_fence();
            const std::vector<std::byte> copied(payload.begin(), payload.begin() + static_cast<std::ptrdiff_t>(at));
            copy.resize(at);
            CHECK(kind == StoreKind::kChecksumOnly || copy == copied);
            CHECK(sum.finish() == checksum_by_definition(copied));
        }
    }
}

void nothing_to_copy(const CopyKernels& kernels) {
    LaneChecksum sum;
    for (const StoreKind kind : kKinds) {
        kernels.copy_runs({}, sum, kind);
        kernels.copy_runs({.run_bytes = 64}, sum, kind);
        kernels.copy_runs({.count = 3}, sum, kind);
    }
    CHECK(sum.finish() == PayloadChecksum{});
}

void plain_streams(const CopyKernels& kernels) {
    const auto source = random_bytes(5000, 5);
    for (std::size_t size = 0; size < 600; ++size) {
        std::vector<std::byte> found(5000, kUntouched);
        std::vector<std::byte> expected = found;
        std::memcpy(expected.data() + size % 70, source.data() + size % 9, size);
        kernels.stream(found.data() + size % 70, source.data() + size % 9, size);
        store_fence();
        CHECK(found == expected);
    }
}

TEST_CASE(only_known_kernels_have_names) {
    CHECK(copy_kernels("portable") != nullptr);
    CHECK(copy_kernels("sse9") == nullptr);
    CHECK(copy_kernels(best_copy_kernels().name) == &best_copy_kernels());
}

template <class Test>
void with_all_kernels(Test&& test) {
    for (const char* const path : kPaths) {
        const CopyKernels* const kernels = copy_kernels(path);
        if (kernels != nullptr)
            test(*kernels);
        else
            std::printf("%s: not on this CPU\n", path);
    }
}

TEST_CASE(every_shape_is_copied_as_memcpy_does) { with_all_kernels(every_shape); }

TEST_CASE(runs_are_joined) { with_all_kernels(runs_join); }

TEST_CASE(long_runs_are_joined) { with_all_kernels(long_runs_join); }

TEST_CASE(nothing_may_be_copied) { with_all_kernels(nothing_to_copy); }

TEST_CASE(streams_are_copied_as_memcpy_does) { with_all_kernels(plain_streams); }

}  // namespace
