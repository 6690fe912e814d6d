#include "lmcache/flush.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace lmcache {
namespace {

constexpr std::size_t kLineBytes = 64;

#if defined(__x86_64__)
constexpr unsigned kClflushopt = 1U << 23;
constexpr unsigned kClwb = 1U << 24;

enum class Instruction { kClflush, kClflushopt, kClwb };

Instruction best() {
    unsigned a, b, c, d;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return Instruction::kClflush;
    if ((b & kClwb) != 0) return Instruction::kClwb;
    return (b & kClflushopt) != 0 ? Instruction::kClflushopt : Instruction::kClflush;
}

void flush_line(Instruction instruction, std::uintptr_t line) {
    auto* const at = reinterpret_cast<volatile char*>(line);
    switch (instruction) {
        case Instruction::kClwb:
            asm volatile("clwb %0" : "+m"(*at));
            break;
        case Instruction::kClflushopt:
            asm volatile("clflushopt %0" : "+m"(*at));
            break;
        case Instruction::kClflush:
            asm volatile("clflush %0" : "+m"(*at));
            break;
    }
}
#endif

}  // namespace

void flush_lines(const std::byte* begin, std::size_t size_bytes) {
    const auto first = reinterpret_cast<std::uintptr_t>(begin) / kLineBytes * kLineBytes;
    const auto end = reinterpret_cast<std::uintptr_t>(begin) + size_bytes;
#if defined(__x86_64__)
    static const Instruction instruction = best();
    for (std::uintptr_t line = first; line < end; line += kLineBytes) flush_line(instruction, line);
#elif defined(__aarch64__)
    for (std::uintptr_t line = first; line < end; line += kLineBytes)
        asm volatile("dc cvac, %0" : : "r"(line) : "memory");
    asm volatile("dsb ish" : : : "memory");
#else
    (void)first;
    (void)end;
#endif
}

}  // namespace lmcache
