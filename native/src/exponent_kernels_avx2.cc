// Half a group in a register.
#if defined(__x86_64__)

#include <immintrin.h>

#include "exponent_paths.h"

#define LMCACHE_ISA __attribute__((target("avx2,bmi,bmi2,popcnt")))
#define LMCACHE_ISA_INLINE LMCACHE_ISA __attribute__((always_inline)) static inline

namespace lmcache {
namespace {

// Without the branch for 0 that portable code has.
LMCACHE_ISA_INLINE int trailing_zeros(std::uint64_t mask) { return static_cast<int>(_tzcnt_u64(mask)); }

#include "exponent_escapes.h"
constexpr std::size_t kHalf = 32;

LMCACHE_ISA_INLINE __m256i load(const void* source) { return _mm256_loadu_si256(static_cast<const __m256i*>(source)); }
LMCACHE_ISA_INLINE void store(void* destination, __m256i value) {
    _mm256_storeu_si256(static_cast<__m256i*>(destination), value);
}
LMCACHE_ISA_INLINE __m256i bytes(unsigned value) { return _mm256_set1_epi8(static_cast<char>(value)); }

// The low bytes of 32 words, in order.
LMCACHE_ISA_INLINE __m256i low_bytes(__m256i first, __m256i second) {
    const __m256i mask = _mm256_set1_epi16(0xff);
    const __m256i packed = _mm256_packus_epi16(_mm256_and_si256(first, mask), _mm256_and_si256(second, mask));
    return _mm256_permute4x64_epi64(packed, 0xd8);
}

LMCACHE_ISA void split(const std::byte* elements, std::size_t groups, std::uint8_t* rest, std::uint8_t* exponents) {
    for (std::size_t i = 0; i < groups * kGroupElements; i += kHalf) {
        const __m256i first = load(elements + 2 * i), second = load(elements + 2 * i + 32);
        store(exponents + i, low_bytes(_mm256_srli_epi16(first, 7), _mm256_srli_epi16(second, 7)));
        const __m256i low = low_bytes(first, second);
        const __m256i high = low_bytes(_mm256_srli_epi16(first, 8), _mm256_srli_epi16(second, 8));
        const __m256i sign = bytes(0x80);
        store(rest + i, _mm256_or_si256(_mm256_andnot_si256(sign, low), _mm256_and_si256(high, sign)));
    }
}

LMCACHE_ISA void merge(const std::uint8_t* rest, const std::uint8_t* exponents, std::size_t groups,
                       std::byte* elements) {
    const __m256i sign = bytes(0x80);
    for (std::size_t i = 0; i < groups * kGroupElements; i += kHalf) {
        // Quarters 0 2 1 3, so that unpacking within 128 bits leaves the elements in order.
        const __m256i sign_mantissa = _mm256_permute4x64_epi64(load(rest + i), 0xd8);
        const __m256i exponent = _mm256_permute4x64_epi64(load(exponents + i), 0xd8);
        const __m256i upper = _mm256_andnot_si256(sign, _mm256_srli_epi16(exponent, 1));
        const __m256i lowest = _mm256_and_si256(sign, _mm256_slli_epi16(exponent, 7));
        const __m256i high = _mm256_or_si256(_mm256_and_si256(sign, sign_mantissa), upper);
        const __m256i low = _mm256_or_si256(_mm256_andnot_si256(sign, sign_mantissa), lowest);
        store(elements + 2 * i, _mm256_unpacklo_epi8(low, high));
        store(elements + 2 * i + 32, _mm256_unpackhi_epi8(low, high));
    }
}

struct Lookup {
    __m256i begin, low, high, escape, zero;
};

LMCACHE_ISA_INLINE __m256i codes_of(const Lookup& lookup, __m256i exponents) {
    const __m256i offset = _mm256_sub_epi8(exponents, lookup.begin);
    const __m256i is_high = _mm256_slli_epi16(offset, 3);  // bit 4 on top of each byte
    const __m256i found =
        _mm256_blendv_epi8(_mm256_shuffle_epi8(lookup.low, offset), _mm256_shuffle_epi8(lookup.high, offset), is_high);
    const __m256i is_inside = _mm256_cmpeq_epi8(_mm256_min_epu8(offset, bytes(kWindowExponents - 1)), offset);
    const __m256i code = _mm256_blendv_epi8(lookup.escape, found, is_inside);
    return _mm256_blendv_epi8(code, lookup.zero, _mm256_cmpeq_epi8(exponents, _mm256_setzero_si256()));
}

LMCACHE_ISA_INLINE Lookup lookup_of(const CodeTable& table) {
    std::uint8_t window[kWindowExponents];
    for (unsigned i = 0; i < kWindowExponents; ++i)
        window[i] = table.code_of[static_cast<std::uint8_t>(table.window_begin + i)];
    return {bytes(table.window_begin), _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<__m128i*>(window))),
            _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<__m128i*>(window + 16))),
            bytes((1U << table.bits) - 1), bytes(table.code_of[0])};
}

template <unsigned kBits>
LMCACHE_ISA std::size_t pack_bits(const std::uint8_t* exponents, std::size_t groups, const CodeTable& table,
                                  std::uint8_t* planes, std::uint8_t* escapes) {
    const Lookup lookup = lookup_of(table);
    std::uint8_t* end = escapes;
    for (std::size_t group = 0; group < groups; ++group, exponents += kGroupElements, planes += 8 * kBits) {
        __m256i first = codes_of(lookup, load(exponents));
        __m256i second = codes_of(lookup, load(exponents + kHalf));
        first = _mm256_slli_epi16(first, 8 - kBits);
        second = _mm256_slli_epi16(second, 8 - kBits);
        std::uint64_t escaped = ~std::uint64_t{0};
        for (unsigned bit = kBits; bit-- > 0;) {
            const auto low = static_cast<std::uint32_t>(_mm256_movemask_epi8(first));
            const auto high = static_cast<std::uint32_t>(_mm256_movemask_epi8(second));
            const std::uint64_t word = low | std::uint64_t{high} << 32;
            std::memcpy(planes + 8 * bit, &word, sizeof word);
            escaped &= word;
            first = _mm256_add_epi8(first, first);
            second = _mm256_add_epi8(second, second);
        }
        end = take_escapes(escaped, exponents, end);
    }
    return static_cast<std::size_t>(end - escapes);
}

// Bytes with `value` where the mask has a bit.
LMCACHE_ISA_INLINE __m256i spread(std::uint32_t mask, unsigned value) {
    const __m256i places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i own_bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
    const __m256i copies = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(mask)), places);
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(copies, own_bit), own_bit), bytes(value));
}

template <unsigned kBits>
LMCACHE_ISA bool unpack_bits(const std::uint8_t* planes, std::size_t groups, const std::uint8_t* exponent_of,
                             const std::uint8_t* escapes, std::size_t escape_count, std::uint8_t* exponents) {
    const std::uint8_t* const end = escapes + escape_count;
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(exponent_of)));
    for (std::size_t group = 0; group < groups; ++group, exponents += kGroupElements, planes += 8 * kBits) {
        __m256i first = _mm256_setzero_si256(), second = first;
        std::uint64_t escaped = ~std::uint64_t{0};
        for (unsigned bit = 0; bit < kBits; ++bit) {
            const std::uint64_t word = plane_word(planes, bit);
            first = _mm256_or_si256(first, spread(static_cast<std::uint32_t>(word), 1U << bit));
            second = _mm256_or_si256(second, spread(static_cast<std::uint32_t>(word >> 32), 1U << bit));
            escaped &= word;
        }
        store(exponents, _mm256_shuffle_epi8(table, first));
        store(exponents + kHalf, _mm256_shuffle_epi8(table, second));
        if (!put_escapes(escaped, escapes, end, exponents)) return false;
    }
    return escapes == end;
}

#include "exponent_widths.h"

}  // namespace

const ExponentKernels kAvx2Exponents = {"avx2", split, merge, pack, unpack};

}  // namespace lmcache

#endif
