// The inner loops of the lossless serdes for 16-bit floating point, one implementation per instruction set.
//
// A bfloat16 is a sign, 8 bits of exponent, 7 of mantissa. Signs and mantissas of KV are noise; its exponents are few.
// `rest` is sign and mantissa in one byte, the sign on top. A group is 64 elements.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmcache {

inline constexpr std::size_t kGroupElements = 64;
inline constexpr unsigned kMaxCodeBits = 4;
inline constexpr std::size_t kMaxCodes = std::size_t{1} << kMaxCodeBits;
inline constexpr std::size_t kWindowExponents = 32;
inline constexpr std::size_t kSlackBytes = 64;

// Exponents that have a code lie in a window of kWindowExponents, and 0 may be one besides.
// Invariant: code_of[e] < 2^bits - 1 for those, and 2^bits - 1, which escapes, for all others.
struct CodeTable {
    unsigned bits = 0;
    std::uint8_t window_begin = 0;
    std::uint8_t code_of[256];
    std::uint8_t exponent_of[kMaxCodes];  // 0 beyond the codes
};

struct ExponentKernels {
    const char* name;  // "avx512", "avx2" or "portable"

    void (*split)(const std::byte* elements, std::size_t groups, std::uint8_t* rest, std::uint8_t* exponents);
    void (*merge)(const std::uint8_t* rest, const std::uint8_t* exponents, std::size_t groups, std::byte* elements);

    // Codes of `groups` groups as planes of bits: of each group table.bits words of 64 bits, bit i of word k is bit k
    // of the code of element i. What has no code goes to `escapes` in order, which has room for every element. Returns
    // how many. Up to kSlackBytes behind exponents and escapes are used as well.
    std::size_t (*pack)(const std::uint8_t* exponents, std::size_t groups, const CodeTable& table, std::uint8_t* planes,
                        std::uint8_t* escapes);

    // The reverse. False: the planes do not use up exactly `escape_count` escapes. Up to kSlackBytes
    // behind exponents are used as well.
    bool (*unpack)(const std::uint8_t* planes, std::size_t groups, unsigned bits, const std::uint8_t* exponent_of,
                   const std::uint8_t* escapes, std::size_t escape_count, std::uint8_t* exponents);
};

// Those of this CPU's best path.
const ExponentKernels& best_exponent_kernels();

// Kernels by name, or nullptr if the name is unknown or this CPU cannot run them. For tests and benchmarks.
const ExponentKernels* exponent_kernels(const char* name);

}  // namespace lmcache
