// A group in a register, its planes of bits in mask registers.
#if defined(__x86_64__)

#include <immintrin.h>

#include "exponent_paths.h"

#define LMCACHE_ISA __attribute__((target("avx512f,avx512bw,bmi,bmi2,popcnt")))
#define LMCACHE_ISA_INLINE LMCACHE_ISA __attribute__((always_inline)) static inline

namespace lmcache {
namespace {

// Without the branch for 0 that portable code has.
LMCACHE_ISA_INLINE int trailing_zeros(std::uint64_t mask) { return static_cast<int>(_tzcnt_u64(mask)); }

#include "exponent_escapes.h"
// Bitwise: the second where the first has a bit, else the third.
constexpr int kSelect = 0xca;
constexpr __mmask8 kAllWords = 0xff;

LMCACHE_ISA_INLINE __m512i load(const void* source) { return _mm512_loadu_si512(source); }
LMCACHE_ISA_INLINE void store(void* destination, __m512i value) { _mm512_storeu_si512(destination, value); }
LMCACHE_ISA_INLINE __m512i bytes(unsigned value) { return _mm512_set1_epi8(static_cast<char>(value)); }

LMCACHE_ISA_INLINE __m512i reorder(__m512i order, __m512i value) {
    return _mm512_maskz_permutexvar_epi64(kAllWords, order, value);
}

// The low bytes of 64 words, in order.
LMCACHE_ISA_INLINE __m512i low_bytes(__m512i first, __m512i second) {
    const __m512i mask = _mm512_set1_epi16(0xff);
    const __m512i packed = _mm512_packus_epi16(_mm512_and_si512(first, mask), _mm512_and_si512(second, mask));
    return reorder(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed);
}

LMCACHE_ISA void split(const std::byte* elements, std::size_t groups, std::uint8_t* rest, std::uint8_t* exponents) {
    const __m512i mantissa = bytes(0x7f);
    for (std::size_t i = 0; i < groups * kGroupElements; i += kGroupElements) {
        const __m512i first = load(elements + 2 * i), second = load(elements + 2 * i + 64);
        const __m512i low = low_bytes(first, second);
        const __m512i high = low_bytes(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
        const __m512i doubled = _mm512_add_epi8(high, high);
        store(exponents + i, _mm512_mask_add_epi8(doubled, _mm512_movepi8_mask(low), doubled, bytes(1)));
        store(rest + i, _mm512_ternarylogic_epi32(mantissa, low, high, kSelect));
    }
}

LMCACHE_ISA void merge(const std::uint8_t* rest, const std::uint8_t* exponents, std::size_t groups,
                       std::byte* elements) {
    const __m512i mantissa = bytes(0x7f);
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // what unpacking within 128 bits undoes
    for (std::size_t i = 0; i < groups * kGroupElements; i += kGroupElements) {
        const __m512i sign_mantissa = reorder(order, load(rest + i));
        const __m512i exponent = reorder(order, load(exponents + i));
        const __m512i high =
            _mm512_ternarylogic_epi32(mantissa, _mm512_srli_epi16(exponent, 1), sign_mantissa, kSelect);
        const __m512i low = _mm512_ternarylogic_epi32(mantissa, sign_mantissa, _mm512_slli_epi16(exponent, 7), kSelect);
        store(elements + 2 * i, _mm512_unpacklo_epi8(low, high));
        store(elements + 2 * i + 64, _mm512_unpackhi_epi8(low, high));
    }
}

struct Lookup {
    __m512i begin, low, high, escape, zero;
};

LMCACHE_ISA_INLINE __m512i codes_of(const Lookup& lookup, __m512i exponents) {
    const __m512i offset = _mm512_sub_epi8(exponents, lookup.begin);
    const __mmask64 is_high = _mm512_test_epi8_mask(offset, bytes(16));
    const __m512i low = _mm512_shuffle_epi8(lookup.low, offset);
    const __m512i found = _mm512_mask_shuffle_epi8(low, is_high, lookup.high, offset);
    const __mmask64 is_outside = _mm512_cmpge_epu8_mask(offset, bytes(kWindowExponents));
    const __m512i code = _mm512_mask_blend_epi8(is_outside, found, lookup.escape);
    return _mm512_mask_blend_epi8(_mm512_testn_epi8_mask(exponents, exponents), code, lookup.zero);
}

LMCACHE_ISA_INLINE __m512i four_times(const std::uint8_t* sixteen) {
    return _mm512_maskz_broadcast_i32x4(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(sixteen)));
}

template <unsigned kBits>
LMCACHE_ISA std::size_t pack_bits(const std::uint8_t* exponents, std::size_t groups, const CodeTable& table,
                                  std::uint8_t* planes, std::uint8_t* escapes) {
    std::uint8_t window[kWindowExponents];
    for (unsigned i = 0; i < kWindowExponents; ++i)
        window[i] = table.code_of[static_cast<std::uint8_t>(table.window_begin + i)];
    const Lookup lookup = {bytes(table.window_begin), four_times(window), four_times(window + 16),
                           bytes((1U << kBits) - 1), bytes(table.code_of[0])};
    std::uint8_t* end = escapes;
    for (std::size_t group = 0; group < groups; ++group, exponents += kGroupElements, planes += 8 * kBits) {
        const __m512i codes = codes_of(lookup, load(exponents));
        std::uint64_t escaped = ~std::uint64_t{0};
        for (unsigned bit = 0; bit < kBits; ++bit) {
            const std::uint64_t word = _mm512_test_epi8_mask(codes, bytes(1U << bit));
            std::memcpy(planes + 8 * bit, &word, sizeof word);
            escaped &= word;
        }
        end = take_escapes(escaped, exponents, end);
    }
    return static_cast<std::size_t>(end - escapes);
}

template <unsigned kBits>
LMCACHE_ISA bool unpack_bits(const std::uint8_t* planes, std::size_t groups, const std::uint8_t* exponent_of,
                             const std::uint8_t* escapes, std::size_t escape_count, std::uint8_t* exponents) {
    const std::uint8_t* const end = escapes + escape_count;
    const __m512i table = four_times(exponent_of);
    for (std::size_t group = 0; group < groups; ++group, exponents += kGroupElements, planes += 8 * kBits) {
        __m512i codes = _mm512_setzero_si512();
        std::uint64_t escaped = ~std::uint64_t{0};
        for (unsigned bit = 0; bit < kBits; ++bit) {
            const std::uint64_t word = plane_word(planes, bit);
            codes = _mm512_mask_add_epi8(codes, word, codes, bytes(1U << bit));
            escaped &= word;
        }
        store(exponents, _mm512_shuffle_epi8(table, codes));
        if (!put_escapes(escaped, escapes, end, exponents)) return false;
    }
    return escapes == end;
}

#include "exponent_widths.h"

}  // namespace

const ExponentKernels kAvx512Exponents = {"avx512", split, merge, pack, unpack};

}  // namespace lmcache

#endif
