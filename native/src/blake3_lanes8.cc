// Eight inputs side by side in AVX2 registers.
#if defined(__x86_64__)

#include <immintrin.h>

#define LMCACHE_ISA __attribute__((target("avx2")))

#include "blake3_compress.h"
#include "blake3_paths.h"

namespace lmcache {
namespace {

struct Isa {
    static constexpr std::size_t kLanes = 8;
    typedef std::uint32_t Word __attribute__((vector_size(32)));

    // Four words of each block at a time: rows of two blocks, lane j beside lane j + 4, turned within 128 bits.
    LMCACHE_INLINE static void load(Word (&m)[16], const std::byte* const* blocks) {
        for (int quarter = 0; quarter < 4; ++quarter) {
            __m256i rows[4];
            for (int j = 0; j < 4; ++j) {
                const auto* low = reinterpret_cast<const __m128i*>(blocks[j]) + quarter;
                const auto* high = reinterpret_cast<const __m128i*>(blocks[j + 4]) + quarter;
                rows[j] =
                    _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(low)), _mm_loadu_si128(high), 1);
            }
            const __m256i low01 = _mm256_unpacklo_epi32(rows[0], rows[1]);
            const __m256i high01 = _mm256_unpackhi_epi32(rows[0], rows[1]);
            const __m256i low23 = _mm256_unpacklo_epi32(rows[2], rows[3]);
            const __m256i high23 = _mm256_unpackhi_epi32(rows[2], rows[3]);
            m[4 * quarter + 0] = reinterpret_cast<Word>(_mm256_unpacklo_epi64(low01, low23));
            m[4 * quarter + 1] = reinterpret_cast<Word>(_mm256_unpackhi_epi64(low01, low23));
            m[4 * quarter + 2] = reinterpret_cast<Word>(_mm256_unpacklo_epi64(high01, high23));
            m[4 * quarter + 3] = reinterpret_cast<Word>(_mm256_unpackhi_epi64(high01, high23));
        }
    }
};

// AVX2 cannot rotate, but it can move bytes.
template <>
LMCACHE_INLINE void rotate_right<Isa::Word, 16>(Isa::Word& word) {
    const __m256i order = _mm256_setr_epi8(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13,  //
                                           2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    word = reinterpret_cast<Isa::Word>(_mm256_shuffle_epi8(reinterpret_cast<__m256i>(word), order));
}

template <>
LMCACHE_INLINE void rotate_right<Isa::Word, 8>(Isa::Word& word) {
    const __m256i order = _mm256_setr_epi8(1, 2, 3, 0, 5, 6, 7, 4, 9, 10, 11, 8, 13, 14, 15, 12,  //
                                           1, 2, 3, 0, 5, 6, 7, 4, 9, 10, 11, 8, 13, 14, 15, 12);
    word = reinterpret_cast<Isa::Word>(_mm256_shuffle_epi8(reinterpret_cast<__m256i>(word), order));
}

}  // namespace
}  // namespace lmcache

#include "blake3_lanes.h"

namespace lmcache {

const Blake3Kernel kBlake3Lanes8 = {Isa::kLanes, hash_lanes};

}  // namespace lmcache

#endif
