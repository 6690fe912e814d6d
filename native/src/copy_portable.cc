// The copy for CPUs without a better path: words, CRC by table, ordinary stores.
#include "copy_paths.h"

#define LMCACHE_ISA

namespace lmcache {
namespace {

struct Isa {
    static constexpr std::size_t kBlockBytes = 32;
    struct Block {
        std::uint64_t words[4];
    };

    static Block load(const std::byte* source) {
        Block block;
        __builtin_memcpy(&block, source, sizeof block);
        return block;
    }
    static void store(std::byte* destination, const Block& block) {
        __builtin_memcpy(destination, &block, sizeof block);
    }
    static void stream(std::byte* destination, const Block& block) { store(destination, block); }
    static std::uint64_t crc_word(std::uint64_t crc, std::uint64_t word) {
        return crc32c_word_portable(static_cast<std::uint32_t>(crc), word);
    }
    static void crc_block(Lanes& lanes, const Block& block, const std::byte*) {
        lanes.c0 = crc_word(lanes.c0, block.words[0]);
        lanes.c1 = crc_word(lanes.c1, block.words[1]);
        lanes.c2 = crc_word(lanes.c2, block.words[2]);
        lanes.c3 = crc_word(lanes.c3, block.words[3]);
    }
};

}  // namespace
}  // namespace lmcache

#include "copy_body.h"

namespace lmcache {

const CopyKernels kPortableCopy = {"portable", copy_runs, stream_copy};

}  // namespace lmcache
