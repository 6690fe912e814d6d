// Definitions of L1Core's templates, for the files that implement L1Core.
#pragma once

#include <algorithm>
#include <array>
#include <stdexcept>

#include "lmcache/l1_core.h"

namespace lmcache {

template <typename Visit>
void L1Core::sweep(NamespaceNumbers namespaces, Hashes hashes, Visit&& visit) const {
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
            keys[i] = {hash_key_(namespaces[position], &hashes[chunk * kChunkHashBytes]), chunk, position};
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

template <typename Visit>
void L1Core::for_each_resident(NamespaceDigests namespaces, Hashes hashes, Visit&& visit) {
    if (hashes.size() != namespaces.size() * kChunkHashBytes) {
        throw std::invalid_argument("there must be one hash of 32 bytes for each namespace");
    }
    for (std::size_t i = 0; i < namespaces.size(); ++i) {
        const std::uint32_t name_space = namespaces_.find(namespaces[i]);
        if (name_space == kNoNamespace) continue;
        const std::uint8_t* const hash = &hashes[i * kChunkHashBytes];
        const std::uint32_t index = find(hash_key_(name_space, hash), name_space, hash);
        if (index != kNoObject && objects_[index].state == ObjectState::kResident) visit(i, index);
    }
}

}  // namespace lmcache
