// The BLAKE3 compression function over any type with +, ^, <<, >>: a uint32_t, or a vector of them that compresses
// several blocks side by side. A path defines LMCACHE_ISA (a target attribute, or nothing) before including this.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmcache {
namespace {

inline constexpr std::uint32_t kIv[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

enum Blake3Flag : std::uint32_t { kChunkStart = 1, kChunkEnd = 2, kParent = 4, kRoot = 8 };

// Row r: which message word each step of round r takes. Row r + 1 is row r sent through the permutation of the
// standard.
inline constexpr std::uint8_t kSchedule[7][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1}, {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4}, {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13}};

#define LMCACHE_INLINE LMCACHE_ISA __attribute__((always_inline)) inline

template <class Word, int kBits>
LMCACHE_INLINE void rotate_right(Word& word) {
    word = (word >> kBits) | (word << (32 - kBits));
}

template <class Word>
LMCACHE_INLINE void mix(Word& a, Word& b, Word& c, Word& d, const Word& x, const Word& y) {
    a = a + b + x;
    d = d ^ a;
    rotate_right<Word, 16>(d);
    c = c + d;
    b = b ^ c;
    rotate_right<Word, 12>(b);
    a = a + b + y;
    d = d ^ a;
    rotate_right<Word, 8>(d);
    c = c + d;
    b = b ^ c;
    rotate_right<Word, 7>(b);
}

template <class Word, int kRound>
LMCACHE_INLINE void rounds(Word (&v)[16], const Word (&m)[16]) {
    constexpr const std::uint8_t(&s)[16] = kSchedule[kRound];
    mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
    mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
    mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
    mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
    mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
    mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
    mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
    mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
    if constexpr (kRound < 6) rounds<Word, kRound + 1>(v, m);
}

// Replaces the chaining value `cv` by the compression of one block. `block_bytes` is how much of the block is content.
template <class Word>
LMCACHE_INLINE void compress(Word (&cv)[8], const Word (&m)[16], const Word& counter_low, const Word& counter_high,
                             std::uint32_t block_bytes, std::uint32_t flags) {
    const Word zero = counter_low ^ counter_low;
    Word v[16] = {cv[0],         cv[1],         cv[2],       cv[3],         cv[4],
                  cv[5],         cv[6],         cv[7],       zero + kIv[0], zero + kIv[1],
                  zero + kIv[2], zero + kIv[3], counter_low, counter_high,  zero + block_bytes,
                  zero + flags};
    rounds<Word, 0>(v, m);
    for (int i = 0; i < 8; ++i) cv[i] = v[i] ^ v[i + 8];
}

}  // namespace
}  // namespace lmcache
