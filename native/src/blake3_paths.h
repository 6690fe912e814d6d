// The side-by-side BLAKE3 kernels that this build contains. Whether the CPU can run them is decided in blake3.cc.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmcache {

// As many inputs as the kernel has lanes, each of `input_bytes` (at most one BLAKE3 chunk): the chaining value of each,
// with `flags` in every block, `first_flags` and `last_flags` also in the first and last.
struct LaneInputs {
    const std::byte* const* inputs;
    std::size_t input_bytes;
    std::uint64_t counter;  // of lane 0
    bool counter_step;      // lane i has counter + i, else all the same
    std::uint32_t flags;
    std::uint32_t first_flags;
    std::uint32_t last_flags;
};

struct Blake3Kernel {
    std::size_t lanes;
    void (*hash)(const LaneInputs& in, std::byte* out);  // 32 bytes a lane
};

extern const Blake3Kernel kBlake3Lanes1;
extern const Blake3Kernel kBlake3Lanes4;
#if defined(__x86_64__)
extern const Blake3Kernel kBlake3Lanes8;
extern const Blake3Kernel kBlake3Lanes16;
#endif

}  // namespace lmcache
