// CRC-32C by carry-less multiplication: 64 bytes in about three cycles, where the CRC instruction takes eight for four
// interleaved chains, and 24 for one.
//
// Folding (reflected, as CRC-32C is): a 128-bit value at one place of the message may be replaced by another one D bits
// further on, which is congruent modulo the polynomial: the xor of the products of its two words with x^(D+63) and
// x^(D-1). The products are one bit short of their place, hence not 64 and 0.
#include "crc_fold.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>

#define LMCACHE_ISA __attribute__((target("avx512f,vpclmulqdq,sse4.2")))
#define LMCACHE_INLINE LMCACHE_ISA __attribute__((always_inline)) inline
#define LMCACHE_ISA_INLINE LMCACHE_INLINE static

namespace lmcache {
namespace {

constexpr std::size_t kBlockBytes = 64;
constexpr std::size_t kStreams = 4;  // blocks under way: a product takes longer than its turn
constexpr std::size_t kStepBytes = kStreams * kBlockBytes;
static_assert(kStepBytes == kFoldStepBytes);

// x^power modulo the polynomial, its highest term in bit 63.
constexpr std::uint64_t power_of_x(unsigned power) {
    constexpr std::uint32_t kPolynomialReflected = 0x82f63b78;
    std::uint32_t value = 1U << 31;
    for (unsigned i = 0; i < power; ++i) value = (value >> 1) ^ ((value & 1) != 0 ? kPolynomialReflected : 0);
    return std::uint64_t{value} << 32;
}

LMCACHE_ISA_INLINE void fetch(const std::byte* source, std::ptrdiff_t ahead) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(source) + ahead));
}

struct Factors {
    std::uint64_t low, high;
};

constexpr Factors moves_by(unsigned bits) { return {power_of_x(bits + 63), power_of_x(bits - 1)}; }

LMCACHE_ISA_INLINE __m512i in_each_place(const Factors& factors) {
    return _mm512_set4_epi64(static_cast<long long>(factors.high), static_cast<long long>(factors.low),
                             static_cast<long long>(factors.high), static_cast<long long>(factors.low));
}

LMCACHE_ISA_INLINE __m512i moved_onto(__m512i value, __m512i factors, __m512i onto) {
    constexpr int kXorOfThree = 0x96;
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(value, factors, 0x00),
                                     _mm512_clmulepi64_epi128(value, factors, 0x11), onto, kXorOfThree);
}

// Blocks in the order of one chain, read and fetched ahead.
struct OneChain {
    LMCACHE_INLINE __m512i next(const std::byte* source) {
        fetch(source, kCopyAheadBytes);
        return _mm512_loadu_si512(source);
    }
};

// The two words of each lane side by side. Also copies the block: the bytes that are summed are those written.
template <StoreKind kKind>
struct ByLane {
    std::byte* destination;
    const std::byte* last;  // from here on the blocks behind this run are fetched
    std::ptrdiff_t behind;  // and they lie so much further on

    LMCACHE_INLINE __m512i next(const std::byte* source) {
        fetch(source, source < last ? static_cast<std::ptrdiff_t>(kCopyAheadBytes) : behind);
        __m512i block = _mm512_loadu_si512(source);
        if constexpr (kKind != StoreKind::kChecksumOnly) {
            asm volatile("" : "+v"(block));  // one read, not another one for the permutation
            if constexpr (kKind == StoreKind::kStreaming) {
                _mm512_stream_si512(reinterpret_cast<__m512i*>(destination), block);
            } else {
                _mm512_storeu_si512(destination, block);
            }
            destination += kBlockBytes;
        }
        return _mm512_maskz_permutexvar_epi64(0xff, _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), block);
    }
};

// A block that stands for all blocks: whole steps, at least one, of `blocks`, each of which advances its 128-bit places
// by kBitsPerBlock. `first` goes into the first block.
template <unsigned kBitsPerBlock, class Blocks>
LMCACHE_ISA_INLINE __m512i folded(Blocks blocks, const std::byte* source, std::size_t size_bytes, __m512i first) {
    __m512i streams[kStreams];
    for (std::size_t i = 0; i < kStreams; ++i) streams[i] = blocks.next(source + i * kBlockBytes);
    streams[0] = _mm512_xor_si512(streams[0], first);
    constexpr Factors kByStep = moves_by(kStreams * kBitsPerBlock), kByBlock = moves_by(kBitsPerBlock);
    const __m512i step = in_each_place(kByStep), block = in_each_place(kByBlock);
    const std::byte* const end = source + size_bytes;
    for (source += kStepBytes; source != end; source += kStepBytes) {
        for (std::size_t i = 0; i < kStreams; ++i)
            streams[i] = moved_onto(streams[i], step, blocks.next(source + i * kBlockBytes));
    }
    __m512i all = streams[0];
    for (std::size_t i = 1; i < kStreams; ++i) all = moved_onto(all, block, streams[i]);
    return all;
}

}  // namespace

LMCACHE_ISA std::uint32_t fold_crc32c(std::uint32_t crc, const std::byte* source, std::size_t size_bytes) {
    alignas(kBlockBytes) std::uint64_t words[8];
    const __m512i first = _mm512_setr_epi64(crc, 0, 0, 0, 0, 0, 0, 0);
    _mm512_store_si512(words, folded<8 * kBlockBytes>(OneChain{}, source, size_bytes, first));
    std::uint64_t result = 0;
    for (const std::uint64_t word : words) result = _mm_crc32_u64(result, word);
    return static_cast<std::uint32_t>(result);
}

namespace {

template <StoreKind kKind>
LMCACHE_ISA_INLINE void fold(LaneChecksum& sum, const std::byte* source, std::size_t size_bytes, std::byte* destination,
                             const std::byte* next_source) {
    const auto lane = [&sum](std::uint32_t index) -> std::uint32_t& { return sum.lanes[(sum.next_lane + index) % 4]; };
    alignas(kBlockBytes) std::uint64_t words[8];
    const __m512i first = _mm512_setr_epi64(lane(0), 0, lane(1), 0, lane(2), 0, lane(3), 0);
    const std::byte* const last = source + (size_bytes - std::min(size_bytes, kCopyAheadBytes));
    const ByLane<kKind> blocks{destination, last, next_source == nullptr ? 0 : next_source - last};
    _mm512_store_si512(words, folded<2 * kBlockBytes>(blocks, source, size_bytes, first));
    for (std::uint32_t i = 0; i < 4; ++i)
        lane(i) = static_cast<std::uint32_t>(_mm_crc32_u64(_mm_crc32_u64(0, words[2 * i]), words[2 * i + 1]));
}

}  // namespace

LMCACHE_ISA void fold_lanes(LaneChecksum& sum, const std::byte* source, std::size_t size_bytes) {
    fold<StoreKind::kChecksumOnly>(sum, source, size_bytes, nullptr, source + size_bytes);
}

LMCACHE_ISA void fold_and_copy(LaneChecksum& sum, const std::byte* source, std::size_t size_bytes,
                               std::byte* destination, StoreKind kind, const std::byte* next_source) {
    if (kind == StoreKind::kStreaming && reinterpret_cast<std::uintptr_t>(destination) % kBlockBytes == 0) {
        fold<StoreKind::kStreaming>(sum, source, size_bytes, destination, next_source);
    } else {
        fold<StoreKind::kCached>(sum, source, size_bytes, destination, next_source);
    }
}

}  // namespace lmcache

#endif
