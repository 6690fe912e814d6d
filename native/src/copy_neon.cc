// 64 bytes a step in four NEON registers; CRC with the ARMv8 extension, from those same registers.
#if defined(__aarch64__)

#include <arm_acle.h>
#include <arm_neon.h>

#include "copy_paths.h"

#define LMCACHE_ISA __attribute__((target("+crc")))
#define LMCACHE_ISA_INLINE LMCACHE_ISA __attribute__((always_inline)) static inline

namespace lmcache {
namespace {

struct Isa {
    static constexpr std::size_t kBlockBytes = 64;
    struct Block {
        uint64x2_t parts[4];
    };

    LMCACHE_ISA_INLINE Block load(const std::byte* source) {
        const auto* words = reinterpret_cast<const std::uint64_t*>(source);
        return {{vld1q_u64(words), vld1q_u64(words + 2), vld1q_u64(words + 4), vld1q_u64(words + 6)}};
    }
    LMCACHE_ISA_INLINE void store(std::byte* destination, const Block& block) {
        auto* words = reinterpret_cast<std::uint64_t*>(destination);
        vst1q_u64(words, block.parts[0]);
        vst1q_u64(words + 2, block.parts[1]);
        vst1q_u64(words + 4, block.parts[2]);
        vst1q_u64(words + 6, block.parts[3]);
    }
    LMCACHE_ISA_INLINE void stream(std::byte* destination, const Block& block) {
        asm volatile(
            "stnp %q1, %q2, [%0]\n\t"
            "stnp %q3, %q4, [%0, #32]"
            :
            : "r"(destination), "w"(block.parts[0]), "w"(block.parts[1]), "w"(block.parts[2]), "w"(block.parts[3])
            : "memory");
    }
    LMCACHE_ISA_INLINE std::uint64_t crc_word(std::uint64_t crc, std::uint64_t word) {
        return __crc32cd(static_cast<std::uint32_t>(crc), word);
    }
    LMCACHE_ISA_INLINE void crc_block(Lanes& lanes, const Block& block, const std::byte*) {
        for (int half = 0; half < 4; half += 2) {
            lanes.c0 = crc_word(lanes.c0, vgetq_lane_u64(block.parts[half], 0));
            lanes.c1 = crc_word(lanes.c1, vgetq_lane_u64(block.parts[half], 1));
            lanes.c2 = crc_word(lanes.c2, vgetq_lane_u64(block.parts[half + 1], 0));
            lanes.c3 = crc_word(lanes.c3, vgetq_lane_u64(block.parts[half + 1], 1));
        }
    }
};

}  // namespace
}  // namespace lmcache

#include "copy_body.h"

namespace lmcache {

const CopyKernels kNeonCopy = {"neon", copy_runs, stream_copy};

}  // namespace lmcache

#endif
