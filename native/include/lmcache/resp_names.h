// Names of objects and their parts in Redis (docs/formats/remote-names.md, docs/formats/resp.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "lmcache/limits.h"

namespace lmcache {

inline constexpr std::size_t kObjectKeyBytes = kDigestBytes + kChunkHashBytes;
using ObjectKeyView = std::span<const std::byte, kObjectKeyBytes>;

std::string resp_object_name(std::string_view prefix, ObjectKeyView key);
// The key of a name; nullopt for what is not the name of an object of this prefix.
std::optional<std::array<std::byte, kObjectKeyBytes>> parse_resp_object_name(std::string_view prefix,
                                                                             std::string_view name);
std::string resp_object_pattern(std::string_view prefix);  // of SCAN
std::string resp_part_pattern(std::string_view prefix);

// What stands under the name of an object that is stored in parts.
struct RespManifest {
    static constexpr std::size_t kBytes = 64;
    static constexpr std::size_t kWriteIdBytes = 16;
    static constexpr std::uint32_t kMaxParts = 4096;
    static constexpr std::uint64_t kMaxBytes = kMaxObjectBytes + (std::uint64_t{1} << 30);  // header and alignment
    using Image = std::array<std::byte, kBytes>;

    std::uint32_t parts = 0;
    std::uint64_t part_bytes = 0;   // of every part but the last
    std::uint64_t total_bytes = 0;  // of the frame
    std::array<std::byte, kWriteIdBytes> write_id{};

    // Makes that of a frame that is about to be stored, with a random id. Throws std::system_error.
    static RespManifest make(std::uint64_t total_bytes, std::uint64_t part_bytes);
    // nullopt for what is no manifest, or a damaged one.
    static std::optional<RespManifest> parse(std::span<const std::byte> image);
    Image image() const;

    std::string part_name(std::string_view prefix, ObjectKeyView key, std::uint32_t part) const;
    std::uint64_t bytes_of(std::uint32_t part) const;
};

struct RespPartName {
    std::array<std::byte, kObjectKeyBytes> key;
    std::array<std::byte, RespManifest::kWriteIdBytes> write_id;
};
// nullopt for what is not the name of a part of this prefix.
std::optional<RespPartName> parse_resp_part_name(std::string_view prefix, std::string_view name);

}  // namespace lmcache
