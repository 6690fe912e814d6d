// One input in ordinary registers: for what is left over when inputs do not fill a vector.
#define LMCACHE_ISA

#include "blake3_paths.h"

namespace lmcache {
namespace {

// A uint32_t that can be indexed like a vector of one.
struct Isa {
    static constexpr std::size_t kLanes = 1;
    typedef std::uint32_t Word __attribute__((vector_size(4)));

    static void load(Word (&m)[16], const std::byte* const* blocks) { __builtin_memcpy(m, blocks[0], sizeof m); }
};

}  // namespace
}  // namespace lmcache

#include "blake3_lanes.h"

namespace lmcache {

const Blake3Kernel kBlake3Lanes1 = {Isa::kLanes, hash_lanes};

}  // namespace lmcache
