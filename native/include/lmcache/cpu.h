// What this CPU can do, found once. Every kernel with more than one implementation chooses by it at run time.
#pragma once

namespace lmcache {

struct CpuFeatures {
    bool avx2 = false;
    bool avx512f = false;
    bool avx512bw = false;
    bool vpclmulqdq = false;
    bool sse42 = false;
    bool neon = false;
    bool arm_crc32 = false;
};

// Includes what the operating system saves on a context switch: a register set that it does not save counts as absent.
const CpuFeatures& cpu_features();

}  // namespace lmcache
