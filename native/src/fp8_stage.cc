#include "lmcache/fp8_stage.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "lmcache/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lmcache {
namespace {

// What differs between the formats. Codes are a sign and 7 bits of magnitude, ordered like the values.
struct E4m3 {
    static constexpr unsigned kMantissaBits = 3, kBias = 7, kLargest = 0x7e, kFirstNan = 0x7f;
    static constexpr float kLargestValue = 448.0F;
};
struct E5m2 {
    static constexpr unsigned kMantissaBits = 2, kBias = 15, kLargest = 0x7b, kFirstNan = 0x7d;  // 0x7c is infinity
    static constexpr float kLargestValue = 57344.0F;
};

constexpr std::uint32_t kBfloatInfinity = 0x7f80, kBfloatNan = 0x7fc0, kNanCode = 0x7f;
constexpr float kSmallestScaled = 0x1p-100F;  // a group below it loses precision in place of overflowing its scale

// Loops below have no branch, so that the compiler turns them into vectors of the target that they are inlined into.
template <class Format>
[[gnu::always_inline]] inline float scale_of(const std::uint16_t* elements) {
    // The magnitudes of finite elements; a reduction over lanes comes last, so that the long loop is one of vectors.
    constexpr std::size_t kLanes = 32;
    std::uint16_t lanes[kLanes] = {};
    for (std::size_t i = 0; i < kFp8GroupElements; i += kLanes) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            const auto magnitude = static_cast<std::uint16_t>(elements[i + lane] & 0x7fff);
            const auto finite = static_cast<std::uint16_t>(magnitude < kBfloatInfinity ? magnitude : 0);
            lanes[lane] = lanes[lane] < finite ? finite : lanes[lane];
        }
    }
    std::uint16_t largest = 0;
    for (const std::uint16_t lane : lanes) largest = std::max(largest, lane);
    return std::max(std::bit_cast<float>(static_cast<std::uint32_t>(largest) << 16), kSmallestScaled) /
           Format::kLargestValue;
}

// Rounds to nearest, ties to even, and saturates.
template <class Format>
[[gnu::always_inline]] inline std::uint8_t code_of(std::uint32_t element, float inverse_scale) {
    constexpr unsigned kShift = 23 - Format::kMantissaBits;
    constexpr std::uint32_t kHalf = (1U << (kShift - 1)) - 1;
    constexpr std::uint32_t kRebias = (127 - Format::kBias) << Format::kMantissaBits;
    constexpr float kSmallestNormal = std::bit_cast<float>((128 - Format::kBias) << 23);
    // The last bit of this number is worth the smallest code.
    constexpr float kMagic = std::bit_cast<float>((127 + 1 - Format::kBias - Format::kMantissaBits + 23) << 23);
    const std::uint32_t magnitude = element & 0x7fffU;
    const float value = std::bit_cast<float>(magnitude << 16) * inverse_scale;
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t normal = ((bits + kHalf + ((bits >> kShift) & 1U)) >> kShift) - kRebias;
    const std::uint32_t small = std::bit_cast<std::uint32_t>(value + kMagic) - std::bit_cast<std::uint32_t>(kMagic);
    std::uint32_t code = value < kSmallestNormal ? small : normal;
    code = code < Format::kLargest ? code : Format::kLargest;
    code = magnitude > kBfloatInfinity ? kNanCode : code;
    return static_cast<std::uint8_t>(code | (element >> 8 & 0x80U));
}

template <class Format>
[[gnu::always_inline]] inline std::uint16_t element_of(std::uint32_t code, float scale) {
    constexpr unsigned kShift = 23 - Format::kMantissaBits;
    constexpr float kSmallest = std::bit_cast<float>((128 - Format::kBias - Format::kMantissaBits) << 23);
    const std::uint32_t magnitude = code & 0x7fU;
    const float normal = std::bit_cast<float>((magnitude << kShift) + ((127 - Format::kBias) << 23));
    const float small = static_cast<float>(static_cast<std::int32_t>(magnitude)) * kSmallest;
    const float value = (magnitude < (1U << Format::kMantissaBits) ? small : normal) * scale;
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    const std::uint32_t element = magnitude >= Format::kFirstNan ? kBfloatNan : rounded;
    return static_cast<std::uint16_t>(element | (code & 0x80U) << 8);
}

struct Kernels {
    // Both take `groups` whole groups.
    void (*encode)(const std::byte* elements, std::size_t groups, std::byte* scales, std::byte* codes);
    void (*decode)(const std::byte* scales, const std::byte* codes, std::size_t groups, std::byte* elements);
};

template <class Format>
[[gnu::always_inline]] inline void encode_groups(const std::byte* elements, std::size_t groups, std::byte* scales,
                                                 std::byte* codes) {
    for (std::size_t group = 0; group < groups; ++group) {
        std::uint16_t source[kFp8GroupElements];
        std::uint8_t made[kFp8GroupElements];
        std::memcpy(source, elements + group * sizeof source, sizeof source);
        const float scale = scale_of<Format>(source);
        const float inverse = 1.0F / scale;
        for (std::size_t i = 0; i < kFp8GroupElements; ++i) made[i] = code_of<Format>(source[i], inverse);
        std::memcpy(scales + group * sizeof scale, &scale, sizeof scale);
        std::memcpy(codes + group * sizeof made, made, sizeof made);
    }
}

template <class Format>
[[gnu::always_inline]] inline void decode_groups(const std::byte* scales, const std::byte* codes, std::size_t groups,
                                                 std::byte* elements) {
    for (std::size_t group = 0; group < groups; ++group) {
        std::uint8_t source[kFp8GroupElements];
        std::uint16_t made[kFp8GroupElements];
        float scale;
        std::memcpy(&scale, scales + group * sizeof scale, sizeof scale);
        std::memcpy(source, codes + group * sizeof source, sizeof source);
        for (std::size_t i = 0; i < kFp8GroupElements; ++i) made[i] = element_of<Format>(source[i], scale);
        std::memcpy(elements + group * sizeof made, made, sizeof made);
    }
}

#if defined(__x86_64__)
#define LMCACHE_AVX2 [[gnu::target("avx2")]]
#define LMCACHE_AVX512 [[gnu::target("avx512f,avx512bw,prefer-vector-width=512")]]
#endif
#define LMCACHE_FP8_KERNELS(attribute, name)                                                                           \
    template <class Format>                                                                                            \
    attribute void encode_##name(const std::byte* elements, std::size_t groups, std::byte* scales, std::byte* codes) { \
        encode_groups<Format>(elements, groups, scales, codes);                                                        \
    }                                                                                                                  \
    template <class Format>                                                                                            \
    attribute void decode_##name(const std::byte* scales, const std::byte* codes, std::size_t groups,                  \
                                 std::byte* elements) {                                                                \
        decode_groups<Format>(scales, codes, groups, elements);                                                        \
    }
LMCACHE_FP8_KERNELS(, portable)
#if defined(__x86_64__)
// scale_of() and code_of() for 16 elements at a time: the compiler makes no vectors of the way from 16 bits to 8.
template <class Format>
LMCACHE_AVX512 float scale_of_avx512(const std::byte* elements) {
    const __m512i magnitude_bits = _mm512_set1_epi16(0x7fff), infinity = _mm512_set1_epi16(kBfloatInfinity);
    __m512i largest = _mm512_setzero_si512();
    for (std::size_t i = 0; i < 2 * kFp8GroupElements; i += sizeof(__m512i)) {
        const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(elements + i), magnitude_bits);
        const __mmask32 is_finite = _mm512_cmplt_epu16_mask(magnitude, infinity);
        largest = _mm512_mask_max_epu16(largest, is_finite, largest, magnitude);
    }
    const __m512i halves = _mm512_max_epu16(largest, _mm512_srli_epi32(largest, 16));
    const std::uint32_t found = _mm512_reduce_max_epu32(_mm512_and_si512(halves, _mm512_set1_epi32(0xffff)));
    return std::max(std::bit_cast<float>(found << 16), kSmallestScaled) / Format::kLargestValue;
}

template <class Format>
LMCACHE_AVX512 void encode_groups_avx512(const std::byte* elements, std::size_t groups, std::byte* scales,
                                         std::byte* codes) {
    constexpr unsigned kShift = 23 - Format::kMantissaBits;
    const __m512i half = _mm512_set1_epi32((1 << (kShift - 1)) - 1), first_bit = _mm512_set1_epi32(1);
    const __m512i rebias = _mm512_set1_epi32((127 - Format::kBias) << Format::kMantissaBits);
    const __m512i largest = _mm512_set1_epi32(Format::kLargest), nan = _mm512_set1_epi32(kNanCode);
    const __m512i magnitude_bits = _mm512_set1_epi32(0x7fff), infinity = _mm512_set1_epi32(kBfloatInfinity);
    const __m512i sign = _mm512_set1_epi32(0x80);
    const __m512 smallest_normal = _mm512_castsi512_ps(_mm512_set1_epi32((128 - Format::kBias) << 23));
    const __m512i magic = _mm512_set1_epi32((128 - Format::kBias - Format::kMantissaBits + 23) << 23);
    for (std::size_t group = 0; group < groups; ++group) {
        const std::byte* const from = elements + 2 * group * kFp8GroupElements;
        const float scale = scale_of_avx512<Format>(from);
        std::memcpy(scales + group * sizeof scale, &scale, sizeof scale);
        const __m512 inverse = _mm512_set1_ps(1.0F / scale);
        for (std::size_t i = 0; i < kFp8GroupElements; i += 16) {
            const __m512i element =
                _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 2 * i)));
            const __m512i magnitude = _mm512_and_si512(element, magnitude_bits);
            const __m512 value = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(magnitude, 16)), inverse);
            const __m512i bits = _mm512_castps_si512(value);
            const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, kShift), first_bit);
            const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, half), odd), kShift);
            const __m512i small =
                _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(value, _mm512_castsi512_ps(magic))), magic);
            const __mmask16 is_small = _mm512_cmp_ps_mask(value, smallest_normal, _CMP_LT_OQ);
            __m512i code = _mm512_mask_mov_epi32(_mm512_sub_epi32(rounded, rebias), is_small, small);
            code = _mm512_min_epu32(code, largest);
            code = _mm512_mask_mov_epi32(code, _mm512_cmpgt_epu32_mask(magnitude, infinity), nan);
            code = _mm512_or_si512(code, _mm512_and_si512(_mm512_srli_epi32(element, 8), sign));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + group * kFp8GroupElements + i),
                             _mm512_cvtepi32_epi8(code));
        }
    }
}

LMCACHE_FP8_KERNELS(LMCACHE_AVX2, avx2)
LMCACHE_FP8_KERNELS(LMCACHE_AVX512, avx512)
#endif

template <class Format>
Kernels kernels_of(std::string_view path) {
#if defined(__x86_64__)
    if (path == "avx512") return {encode_groups_avx512<Format>, decode_avx512<Format>};
    if (path == "avx2") return {encode_avx2<Format>, decode_avx2<Format>};
#endif
    return {encode_portable<Format>, decode_portable<Format>};
}

// The payload is the scales of all groups (float32), their codes, and the bytes that fill no group.
class Fp8Stage final : public SerdeStage {
public:
    explicit Fp8Stage(const Kernels& kernels) : kernels_(kernels) {}

    bool is_lossy() const override { return true; }

    std::size_t max_encoded_bytes(std::size_t source_bytes) const override {
        const std::size_t groups = source_bytes / kGroupBytes;
        return groups * (sizeof(float) + kFp8GroupElements) + source_bytes % kGroupBytes;
    }

    std::optional<std::size_t> encode(std::span<const std::byte> source, std::span<std::byte> destination,
                                      const SerdeObject&, std::vector<std::byte>&) const override {
        const std::size_t groups = source.size() / kGroupBytes, tail = source.size() % kGroupBytes;
        const std::size_t size = max_encoded_bytes(source.size());
        if (destination.size() < size) throw std::invalid_argument("the destination of fp8 is too small");
        std::byte* const codes = destination.data() + groups * sizeof(float);
        kernels_.encode(source.data(), groups, destination.data(), codes);
        std::copy_n(source.end() - static_cast<std::ptrdiff_t>(tail), tail, codes + groups * kFp8GroupElements);
        return size;
    }

    SerdeFault decode(std::span<const std::byte> source, std::span<std::byte> destination, const SerdeObject&,
                      std::span<const std::byte> parameters) const override {
        if (!parameters.empty() || source.size() != max_encoded_bytes(destination.size())) return SerdeFault::kCorrupt;
        const std::size_t groups = destination.size() / kGroupBytes, tail = destination.size() % kGroupBytes;
        kernels_.decode(source.data(), source.data() + groups * sizeof(float), groups, destination.data());
        std::copy_n(source.end() - static_cast<std::ptrdiff_t>(tail), tail,
                    destination.end() - static_cast<std::ptrdiff_t>(tail));
        return SerdeFault::kNone;
    }

private:
    static constexpr std::size_t kGroupBytes = 2 * kFp8GroupElements;

    const Kernels kernels_;
};

}  // namespace

bool runs_fp8_path(std::string_view path) {
    return path == "portable" || (path == "avx2" && cpu_features().avx2) ||
           (path == "avx512" && cpu_features().avx512bw);
}

std::shared_ptr<const SerdeStage> make_fp8_stage(Fp8Format format, std::string_view path) {
    if (path.empty()) path = runs_fp8_path("avx512") ? "avx512" : runs_fp8_path("avx2") ? "avx2" : "portable";
    if (!runs_fp8_path(path)) throw std::invalid_argument("path must be one that this CPU can run");
    return std::make_shared<Fp8Stage>(format == Fp8Format::kE4m3 ? kernels_of<E4m3>(path) : kernels_of<E5m2>(path));
}

}  // namespace lmcache
