// Frames for tests that move some.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "lmcache/frame.h"
#include "lmcache/frame_stream.h"

namespace lmcache {

// Frames of different sizes in one piece of memory, and room for them elsewhere.
struct Frames {
    explicit Frames(std::vector<std::uint64_t> payloads) : payload_bytes(std::move(payloads)) {
        std::uint64_t end = 0;
        for (std::size_t i = 0; i < payload_bytes.size(); ++i) {
            offsets.push_back(end);
            sizes.push_back((kFrameHeaderBytes + payload_bytes[i] + 4095) / 4096 * 4096);
            end += sizes.back();
        }
        source.resize(end);
        target.resize(end);
        for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 131 >> 3);
        digests.resize(kDigestBytes * sizes.size(), std::byte{5});
        hashes.resize(kChunkHashBytes * sizes.size());
        for (std::size_t i = 0; i < hashes.size(); ++i) hashes[i] = static_cast<std::byte>(i);
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            sources.push_back(reinterpret_cast<std::uint64_t>(source.data() + offsets[i]));
            targets.push_back(reinterpret_cast<std::uint64_t>(target.data() + offsets[i]));
            frame_seal(source.data() + offsets[i],
                       frame_template(std::vector<std::byte>(40), std::span(digests).first(kDigestBytes),
                                      payload_bytes[i], "", {}),
                       std::span(hashes).subspan(i * kChunkHashBytes).first<kChunkHashBytes>());
        }
    }
    FrameBatch batch() const { return {targets, sizes, digests, hashes}; }

    std::vector<std::uint64_t> payload_bytes, offsets, sizes, sources, targets;
    std::vector<std::byte> source, target, digests, hashes;
};

}  // namespace lmcache
