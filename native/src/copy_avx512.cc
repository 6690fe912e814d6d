// 64 bytes a step, a whole cache line, in one AVX-512 register; CRC with SSE4.2.
#if defined(__x86_64__)

#include <immintrin.h>

#include "copy_paths.h"

#define LMCACHE_ISA __attribute__((target("avx512f,sse4.2")))
#define LMCACHE_ISA_INLINE LMCACHE_ISA __attribute__((always_inline)) static inline

namespace lmcache {
namespace {

struct Isa {
    static constexpr std::size_t kBlockBytes = 64;
    using Block = __m512i;

    LMCACHE_ISA_INLINE Block load(const std::byte* source) {
        Block block = _mm512_loadu_si512(source);
        // Keeps the compiler from moving the reads of crc_block before this one.
        asm volatile("" : "+v"(block) : : "memory");
        return block;
    }
    LMCACHE_ISA_INLINE void store(std::byte* destination, const Block& block) {
        _mm512_storeu_si512(destination, block);
    }
    LMCACHE_ISA_INLINE void stream(std::byte* destination, const Block& block) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(destination), block);
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

const CopyKernels kAvx512Copy = {"avx512", copy_runs, stream_copy};

}  // namespace lmcache

#endif
