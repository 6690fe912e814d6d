// Four inputs side by side in 16-byte vectors: SSE2 or NEON, which every supported CPU has.
#define LMCACHE_ISA

#include "blake3_compress.h"
#include "blake3_paths.h"

namespace lmcache {
namespace {

struct Isa {
    static constexpr std::size_t kLanes = 4;
    typedef std::uint32_t Word __attribute__((vector_size(16)));

    LMCACHE_INLINE static std::uint32_t word_of(const std::byte* block, std::size_t i) {
        std::uint32_t word;
        __builtin_memcpy(&word, block + 4 * i, sizeof word);
        return word;
    }

    LMCACHE_INLINE static void load(Word (&m)[16], const std::byte* const* blocks) {
        for (std::size_t i = 0; i < 16; ++i) {
            m[i] = Word{word_of(blocks[0], i), word_of(blocks[1], i), word_of(blocks[2], i), word_of(blocks[3], i)};
        }
    }
};

}  // namespace
}  // namespace lmcache

#include "blake3_lanes.h"

namespace lmcache {

const Blake3Kernel kBlake3Lanes4 = {Isa::kLanes, hash_lanes};

}  // namespace lmcache
