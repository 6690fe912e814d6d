// Names of object files (docs/formats/files.md).
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "lmcache/frame.h"

namespace lmcache {

inline constexpr std::string_view kObjectSuffix = ".data";

inline void append_hex(std::string& text, std::span<const std::byte> bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    std::size_t end = text.size();
    text.resize(end + 2 * bytes.size());
    for (const std::byte byte : bytes) {
        text[end++] = kDigits[std::to_integer<unsigned>(byte) >> 4];
        text[end++] = kDigits[std::to_integer<unsigned>(byte) & 15];
    }
}

inline std::string object_name(std::span<const std::byte, kChunkHashBytes> hash) {
    std::string name;
    name.reserve(2 * hash.size() + kObjectSuffix.size());
    append_hex(name, hash);
    return name.append(kObjectSuffix);
}

inline std::string object_path(const std::string& base, std::span<const std::byte, kDigestBytes> namespace_digest,
                               std::span<const std::byte, kChunkHashBytes> hash) {
    std::string path;
    path.reserve(base.size() + 2 * (namespace_digest.size() + 1 + hash.size()) + 3 + kObjectSuffix.size());
    path.append(base).append(1, '/');
    append_hex(path, namespace_digest);
    path.append(1, '/');
    append_hex(path, hash.first<1>());
    path.append(1, '/');
    append_hex(path, hash);
    return path.append(kObjectSuffix);
}

}  // namespace lmcache
