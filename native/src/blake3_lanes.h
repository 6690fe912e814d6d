// Hashes several equal-length inputs of at most one BLAKE3 chunk side by side. A path defines LMCACHE_ISA and a struct
// `Isa` before including this: Isa::kLanes, Isa::Word (a vector of kLanes uint32_t) and
//   load(Word (&m)[16], const std::byte* const* blocks)   word i of m = 32-bit word i of each lane's 64-byte block
#pragma once

#include <cstring>

#include "blake3_compress.h"
#include "blake3_paths.h"

namespace lmcache {
namespace {

LMCACHE_ISA void hash_lanes(const LaneInputs& in, std::byte* out) {
    using Word = typename Isa::Word;
    Word counter_low{};
    Word counter_high{};
    for (std::size_t lane = 0; lane < Isa::kLanes; ++lane) {
        const std::uint64_t counter = in.counter + (in.counter_step ? lane : 0);
        counter_low[lane] = static_cast<std::uint32_t>(counter);
        counter_high[lane] = static_cast<std::uint32_t>(counter >> 32);
    }
    Word cv[8];
    for (int i = 0; i < 8; ++i) cv[i] = Word{} + kIv[i];
    const std::byte* at[Isa::kLanes];
    std::memcpy(at, in.inputs, sizeof at);

    std::size_t left = in.input_bytes;
    std::uint32_t flags = in.flags | in.first_flags;
    for (; left > 64; left -= 64) {
        Word m[16];
        Isa::load(m, at);
        compress(cv, m, counter_low, counter_high, 64, flags);
        flags = in.flags;
        for (auto& lane : at) lane += 64;
    }
    // The last block, which may be short or even empty: then it is padded with zero bytes.
    std::byte padded[Isa::kLanes][64];
    if (left < 64) {
        std::memset(padded, 0, sizeof padded);
        for (std::size_t lane = 0; lane < Isa::kLanes; ++lane) {
            if (left != 0) std::memcpy(padded[lane], at[lane], left);
            at[lane] = padded[lane];
        }
    }
    Word m[16];
    Isa::load(m, at);
    compress(cv, m, counter_low, counter_high, static_cast<std::uint32_t>(left), flags | in.last_flags);

    std::uint32_t words[8];
    for (std::size_t lane = 0; lane < Isa::kLanes; ++lane) {
        for (int i = 0; i < 8; ++i) words[i] = cv[i][lane];
        std::memcpy(out + lane * sizeof words, words, sizeof words);
    }
}

}  // namespace
}  // namespace lmcache
