#include <cstring>
#include <initializer_list>

#include "exponent_paths.h"
#include "lmcache/cpu.h"

#define LMCACHE_ISA_INLINE __attribute__((always_inline)) static inline

namespace lmcache {
namespace {

LMCACHE_ISA_INLINE int trailing_zeros(std::uint64_t mask) { return std::countr_zero(mask); }

#include "exponent_escapes.h"
void split(const std::byte* elements, std::size_t groups, std::uint8_t* rest, std::uint8_t* exponents) {
    for (std::size_t i = 0; i < groups * kGroupElements; ++i) {
        std::uint16_t element;
        std::memcpy(&element, elements + 2 * i, sizeof element);
        rest[i] = static_cast<std::uint8_t>((element & 0x7f) | ((element >> 8) & 0x80));
        exponents[i] = static_cast<std::uint8_t>(element >> 7);
    }
}

void merge(const std::uint8_t* rest, const std::uint8_t* exponents, std::size_t groups, std::byte* elements) {
    for (std::size_t i = 0; i < groups * kGroupElements; ++i) {
        const auto element = static_cast<std::uint16_t>((rest[i] & 0x80) << 8 | exponents[i] << 7 | (rest[i] & 0x7f));
        std::memcpy(elements + 2 * i, &element, sizeof element);
    }
}

std::size_t pack(const std::uint8_t* exponents, std::size_t groups, const CodeTable& table, std::uint8_t* planes,
                 std::uint8_t* escapes) {
    const unsigned escape = (1U << table.bits) - 1;
    std::uint8_t* end = escapes;
    for (std::size_t group = 0; group < groups; ++group, exponents += kGroupElements) {
        std::uint64_t words[kMaxCodeBits] = {};
        std::uint64_t escaped = 0;
        for (std::size_t i = 0; i < kGroupElements; ++i) {
            const std::uint64_t code = table.code_of[exponents[i]];
            for (unsigned bit = 0; bit < table.bits; ++bit) words[bit] |= (code >> bit & 1) << i;
            escaped |= std::uint64_t{code == escape} << i;
        }
        std::memcpy(planes, words, 8 * table.bits);
        planes += 8 * table.bits;
        end = take_escapes(escaped, exponents, end);
    }
    return static_cast<std::size_t>(end - escapes);
}

bool unpack(const std::uint8_t* planes, std::size_t groups, unsigned bits, const std::uint8_t* exponent_of,
            const std::uint8_t* escapes, std::size_t escape_count, std::uint8_t* exponents) {
    const std::uint8_t* const end = escapes + escape_count;
    for (std::size_t group = 0; group < groups; ++group, exponents += kGroupElements, planes += 8 * bits) {
        std::uint64_t words[kMaxCodeBits] = {};
        std::uint64_t escaped = ~std::uint64_t{0};
        for (unsigned bit = 0; bit < bits; ++bit) escaped &= words[bit] = plane_word(planes, bit);
        for (std::size_t i = 0; i < kGroupElements; ++i) {
            unsigned code = 0;
            for (unsigned bit = 0; bit < kMaxCodeBits; ++bit) code |= (words[bit] >> i & 1) << bit;
            exponents[i] = exponent_of[code];
        }
        if (!put_escapes(escaped, escapes, end, exponents)) return false;
    }
    return escapes == end;
}

}  // namespace

const ExponentKernels kPortableExponents = {"portable", split, merge, pack, unpack};

const ExponentKernels* exponent_kernels(const char* name) {
    if (std::strcmp(name, kPortableExponents.name) == 0) return &kPortableExponents;
#if defined(__x86_64__)
    const CpuFeatures& cpu = cpu_features();
    if (std::strcmp(name, kAvx512Exponents.name) == 0) return cpu.avx512bw ? &kAvx512Exponents : nullptr;
    if (std::strcmp(name, kAvx2Exponents.name) == 0) return cpu.avx2 ? &kAvx2Exponents : nullptr;
#endif
    return nullptr;
}

const ExponentKernels& best_exponent_kernels() {
    static const ExponentKernels& best = []() -> const ExponentKernels& {
        for (const char* name : {"avx512", "avx2"}) {
            if (const ExponentKernels* found = exponent_kernels(name)) return *found;
        }
        return kPortableExponents;
    }();
    return best;
}

}  // namespace lmcache
