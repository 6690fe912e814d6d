#include "lmcache/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace lmcache {
namespace {

#if defined(__x86_64__)
// Bits of CPUID leaf 1 (ECX), leaf 7 (EBX, ECX) and XCR0, from the architecture manuals.
constexpr unsigned kSse42 = 1U << 20;
constexpr unsigned kOsSavesExtended = 1U << 27;
constexpr unsigned kAvx2 = 1U << 5;
constexpr unsigned kAvx512f = 1U << 16;
constexpr unsigned kAvx512bw = 1U << 30;
constexpr unsigned kVpclmulqdq = 1U << 10;
constexpr unsigned kYmmSaved = 0x06;
constexpr unsigned kZmmSaved = 0xe6;

unsigned saved_registers() {
    unsigned low;
    unsigned high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}
#endif

CpuFeatures detect() {
    CpuFeatures found;
#if defined(__x86_64__)
    unsigned a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0) return found;
    found.sse42 = (c & kSse42) != 0;
    const unsigned saved = (c & kOsSavesExtended) != 0 ? saved_registers() : 0;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return found;
    found.avx2 = (b & kAvx2) != 0 && (saved & kYmmSaved) == kYmmSaved;
    found.avx512f = (b & kAvx512f) != 0 && (saved & kZmmSaved) == kZmmSaved;
    found.avx512bw = found.avx512f && (b & kAvx512bw) != 0;
    found.vpclmulqdq = (c & kVpclmulqdq) != 0 && (saved & kYmmSaved) == kYmmSaved;
#elif defined(__aarch64__)
    const unsigned long capabilities = getauxval(AT_HWCAP);
    found.neon = (capabilities & HWCAP_ASIMD) != 0;
    found.arm_crc32 = (capabilities & HWCAP_CRC32) != 0;
#endif
    return found;
}

}  // namespace

const CpuFeatures& cpu_features() {
    static const CpuFeatures features = detect();
    return features;
}

}  // namespace lmcache
