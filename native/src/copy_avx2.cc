// 64 bytes a step, a whole cache line, in two AVX2 registers; CRC with SSE4.2.
#if defined(__x86_64__)

#include <immintrin.h>

#include "copy_paths.h"

#define LMCACHE_ISA __attribute__((target("avx2,sse4.2")))
#define LMCACHE_ISA_INLINE LMCACHE_ISA __attribute__((always_inline)) static inline

namespace lmcache {
namespace {

struct Isa {
    static constexpr std::size_t kBlockBytes = 64;
    struct Block {
        __m256i low, high;
    };

    LMCACHE_ISA_INLINE Block load(const std::byte* source) {
        __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
        __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 32));
        // Keeps the compiler from moving the reads of crc_block before these.
        asm volatile("" : "+x"(low), "+x"(high) : : "memory");
        return {low, high};
    }
    LMCACHE_ISA_INLINE void store(std::byte* destination, const Block& block) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(destination), block.low);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(destination + 32), block.high);
    }
    LMCACHE_ISA_INLINE void stream(std::byte* destination, const Block& block) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(destination), block.low);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(destination + 32), block.high);
    }
    LMCACHE_ISA_INLINE std::uint64_t crc_word(std::uint64_t crc, std::uint64_t word) {
        return _mm_crc32_u64(crc, word);
    }

    // Reads the words again from the first-level cache, which is cheaper than taking them out of the registers.
    LMCACHE_ISA_INLINE void crc_block(Lanes& lanes, const Block&, const std::byte* source) {
        lanes.c0 = _mm_crc32_u64(_mm_crc32_u64(lanes.c0, word_at(source, 0)), word_at(source, 4));
        lanes.c1 = _mm_crc32_u64(_mm_crc32_u64(lanes.c1, word_at(source, 1)), word_at(source, 5));
        lanes.c2 = _mm_crc32_u64(_mm_crc32_u64(lanes.c2, word_at(source, 2)), word_at(source, 6));
        lanes.c3 = _mm_crc32_u64(_mm_crc32_u64(lanes.c3, word_at(source, 3)), word_at(source, 7));
    }
};

}  // namespace
}  // namespace lmcache

#include "copy_body.h"

namespace lmcache {

const CopyKernels kAvx2Copy = {"avx2", copy_runs, stream_copy};

}  // namespace lmcache

#endif
