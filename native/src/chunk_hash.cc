#include "lmcache/chunk_hash.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "lmcache/blake3.h"

namespace lmcache {

static_assert(kChunkHashBytes == kBlake3Bytes);

std::vector<std::byte> hash_chunks(std::span<const std::uint32_t> tokens, std::size_t chunk_tokens,
                                   std::span<const std::byte> parent, std::span<const std::byte> extras) {
    if (chunk_tokens == 0) throw std::invalid_argument("chunk_tokens must be at least 1");
    if (parent.size() != kChunkHashBytes) throw std::invalid_argument("parent must be 32 bytes");
    const std::size_t chunks = tokens.size() / chunk_tokens;
    if (!extras.empty() && extras.size() != chunks * kChunkHashBytes) {
        throw std::invalid_argument("extras must be empty or hold 32 bytes for each full chunk");
    }
    std::vector<std::byte> hashes(chunks * kChunkHashBytes);
    if (chunks == 0) return hashes;
    // The digests land where the hashes will be; the chain then replaces them one by one.
    blake3_many(reinterpret_cast<const std::byte*>(tokens.data()), chunk_tokens * sizeof(std::uint32_t), chunks,
                hashes.data());
    std::byte link[3 * kChunkHashBytes];
    std::memcpy(link, parent.data(), kChunkHashBytes);
    for (std::size_t i = 0; i < chunks; ++i) {
        std::byte* const hash = hashes.data() + i * kChunkHashBytes;
        std::memcpy(link + kChunkHashBytes, hash, kChunkHashBytes);
        std::size_t link_bytes = 2 * kChunkHashBytes;
        if (!extras.empty()) {
            const auto extra = extras.subspan(i * kChunkHashBytes, kChunkHashBytes);
            if (std::ranges::any_of(extra, [](std::byte b) { return b != std::byte{0}; })) {
                std::memcpy(link + link_bytes, extra.data(), kChunkHashBytes);
                link_bytes += kChunkHashBytes;
            }
        }
        const Blake3Digest digest = blake3({link, link_bytes});
        std::memcpy(hash, digest.data(), kChunkHashBytes);
        std::memcpy(link, digest.data(), kChunkHashBytes);
    }
    return hashes;
}

std::vector<std::byte> cbor_numbers(std::span<const std::uint32_t> numbers) {
    constexpr std::size_t kLongest = 5;
    std::vector<std::byte> encoded(numbers.size() * kLongest);
    std::byte* end = encoded.data();
    for (const std::uint32_t number : numbers) {
        int size_bytes = 0;
        if (number < 24) {
            *end++ = static_cast<std::byte>(number);
            continue;
        }
        if (number <= 0xFF) {
            *end++ = std::byte{0x18};
            size_bytes = 1;
        } else if (number <= 0xFFFF) {
            *end++ = std::byte{0x19};
            size_bytes = 2;
        } else {
            *end++ = std::byte{0x1A};
            size_bytes = 4;
        }
        for (int shift = 8 * (size_bytes - 1); shift >= 0; shift -= 8) *end++ = static_cast<std::byte>(number >> shift);
    }
    encoded.resize(static_cast<std::size_t>(end - encoded.data()));
    return encoded;
}

}  // namespace lmcache
