#include "lmcache/copy.h"

#include <cstring>

#include "copy_paths.h"
#include "crc_fold.h"
#include "lmcache/cpu.h"

namespace lmcache {

// Instructions rather than std::atomic_thread_fence, which knows nothing of streaming stores and which TSan cannot
// follow.
void store_fence() {
#if defined(__x86_64__)
    asm volatile("sfence" : : : "memory");
#elif defined(__aarch64__)
    asm volatile("dmb ishst" : : : "memory");
#else
    __sync_synchronize();
#endif
}

void load_fence() {
#if defined(__x86_64__)
    asm volatile("" : : : "memory");  // loads stay in order
#elif defined(__aarch64__)
    asm volatile("dmb ishld" : : : "memory");
#else
    __sync_synchronize();
#endif
}

const CopyKernels* copy_kernels(const char* name) {
    const CpuFeatures& cpu = cpu_features();
#if defined(__x86_64__)
    if (std::strcmp(name, kClmulCopy.name) == 0) return can_fold(cpu) ? &kClmulCopy : nullptr;
    if (std::strcmp(name, kAvx512Copy.name) == 0) return cpu.avx512f && cpu.sse42 ? &kAvx512Copy : nullptr;
    if (std::strcmp(name, kAvx2Copy.name) == 0) return cpu.avx2 && cpu.sse42 ? &kAvx2Copy : nullptr;
#elif defined(__aarch64__)
    if (std::strcmp(name, kNeonCopy.name) == 0) return cpu.neon && cpu.arm_crc32 ? &kNeonCopy : nullptr;
#else
    (void)cpu;
#endif
    return std::strcmp(name, kPortableCopy.name) == 0 ? &kPortableCopy : nullptr;
}

const CopyKernels& best_copy_kernels() {
    static const CopyKernels* const best = [] {
        for (const char* name : {"clmul", "avx512", "avx2", "neon"}) {
            if (const CopyKernels* kernels = copy_kernels(name)) return kernels;
        }
        return &kPortableCopy;
    }();
    return *best;
}

}  // namespace lmcache
