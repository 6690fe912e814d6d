// Definition of L1Core::sweep, for the files that implement L1Core.
#pragma once

#include <algorithm>

#include "lmcache/l1_core.h"

namespace lmcache {

template <typename Visit>
void L1Core::sweep(NamespaceIds namespaces, Hashes hashes, Visit&& visit) const {
    constexpr std::size_t kAhead = 32;
    struct Key {
        std::uint64_t key_hash;
        std::size_t chunk;
        std::size_t position;
    };
    std::array<Key, kAhead> keys;
    const std::size_t total = namespaces.size() * (hashes.size() / kChunkHashBytes);
    std::size_t chunk = 0;
    std::size_t position = 0;
    for (std::size_t begin = 0; begin < total; begin += kAhead) {
        const std::size_t count = std::min(kAhead, total - begin);
        for (std::size_t i = 0; i < count; ++i) {
            keys[i] = {hash_key(namespaces[position], &hashes[chunk * kChunkHashBytes]), chunk, position};
            keys_.prefetch(keys[i].key_hash);
            if (++position == namespaces.size()) {
                position = 0;
                ++chunk;
            }
        }
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint32_t candidate = keys_.candidate(keys[i].key_hash);
            if (candidate != kNoObject) objects_.prefetch(candidate);
        }
        for (std::size_t i = 0; i < count; ++i) {
            const Key& key = keys[i];
            if (!visit(key.chunk, key.position, key.key_hash, &hashes[key.chunk * kChunkHashBytes])) return;
        }
    }
}

}  // namespace lmcache
