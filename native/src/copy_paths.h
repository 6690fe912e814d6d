// The kernels that this build contains. Whether the CPU can run them is decided in copy.cc.
#pragma once

#include "lmcache/copy.h"

namespace lmcache {

// The four registers of a payload checksum, turned so that c0 takes the next word. Wide, as the x86 instruction has
// them.
struct Lanes {
    std::uint64_t c0, c1, c2, c3;
};

inline std::uint64_t word_at(const std::byte* source, std::size_t index) {
    std::uint64_t word;
    __builtin_memcpy(&word, source + 8 * index, sizeof word);
    return word;
}

extern const CopyKernels kPortableCopy;
#if defined(__x86_64__)
extern const CopyKernels kAvx2Copy;
extern const CopyKernels kAvx512Copy;
extern const CopyKernels kClmulCopy;  // where can_fold (crc_fold.h)
#elif defined(__aarch64__)
extern const CopyKernels kNeonCopy;
#endif

}  // namespace lmcache
