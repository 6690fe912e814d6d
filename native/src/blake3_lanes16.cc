// Sixteen inputs side by side in AVX-512 registers.
#if defined(__x86_64__)

#include <immintrin.h>

#define LMCACHE_ISA __attribute__((target("avx512f")))

#include "blake3_compress.h"
#include "blake3_paths.h"

namespace lmcache {
namespace {

struct Isa {
    static constexpr std::size_t kLanes = 16;
    typedef std::uint32_t Word __attribute__((vector_size(64)));

    LMCACHE_INLINE static __m128i piece(const std::byte* block, int quarter) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(block) + quarter);
    }

    // A mask that selects everything costs nothing; the forms without one trip warnings in GCC's own header.
    static constexpr __mmask16 kAllWords = 0xffff;
    static constexpr __mmask8 kAllPairs = 0xff;

    // Four words of each block at a time: rows of four blocks, lanes j, j + 4, j + 8, j + 12, turned within 128 bits.
    LMCACHE_INLINE static void load(Word (&m)[16], const std::byte* const* blocks) {
        for (int quarter = 0; quarter < 4; ++quarter) {
            __m512i rows[4];
            for (int j = 0; j < 4; ++j) {
                __m512i row = _mm512_castsi128_si512(piece(blocks[j], quarter));
                row = _mm512_inserti32x4(row, piece(blocks[j + 4], quarter), 1);
                row = _mm512_inserti32x4(row, piece(blocks[j + 8], quarter), 2);
                rows[j] = _mm512_inserti32x4(row, piece(blocks[j + 12], quarter), 3);
            }
            const __m512i low01 = _mm512_maskz_unpacklo_epi32(kAllWords, rows[0], rows[1]);
            const __m512i high01 = _mm512_maskz_unpackhi_epi32(kAllWords, rows[0], rows[1]);
            const __m512i low23 = _mm512_maskz_unpacklo_epi32(kAllWords, rows[2], rows[3]);
            const __m512i high23 = _mm512_maskz_unpackhi_epi32(kAllWords, rows[2], rows[3]);
            m[4 * quarter + 0] = reinterpret_cast<Word>(_mm512_maskz_unpacklo_epi64(kAllPairs, low01, low23));
            m[4 * quarter + 1] = reinterpret_cast<Word>(_mm512_maskz_unpackhi_epi64(kAllPairs, low01, low23));
            m[4 * quarter + 2] = reinterpret_cast<Word>(_mm512_maskz_unpacklo_epi64(kAllPairs, high01, high23));
            m[4 * quarter + 3] = reinterpret_cast<Word>(_mm512_maskz_unpackhi_epi64(kAllPairs, high01, high23));
        }
    }
};

}  // namespace
}  // namespace lmcache

#include "blake3_lanes.h"

namespace lmcache {

const Blake3Kernel kBlake3Lanes16 = {Isa::kLanes, hash_lanes};

}  // namespace lmcache

#endif
