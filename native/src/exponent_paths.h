// The kernels that this build contains, and what they share. Whether the CPU can run them is decided in
// exponent_kernels.cc.
#pragma once

#include <bit>
#include <cstring>

#include "lmcache/exponent_kernels.h"

namespace lmcache {

extern const ExponentKernels kPortableExponents;
#if defined(__x86_64__)
extern const ExponentKernels kAvx2Exponents;
extern const ExponentKernels kAvx512Exponents;
#endif

inline std::uint64_t plane_word(const std::uint8_t* planes, std::size_t index) {
    std::uint64_t word;
    std::memcpy(&word, planes + 8 * index, sizeof word);
    return word;
}

}  // namespace lmcache
