// The directory of a DAX device as it is read at start (docs/formats/dax.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lmcache {

inline constexpr std::size_t kDaxEntryBytes = 128;
inline constexpr std::size_t kDaxNameBytes = 64;
inline constexpr std::size_t kDaxIdBytes = 16;

// CRC-32 as zlib has it. `crc`: of what came before, 0 at first.
std::uint32_t crc32_zlib(std::span<const std::byte> bytes, std::uint32_t crc = 0);

struct DaxDirectory {
    // Objects, last used first.
    std::vector<std::uint32_t> slots;
    std::vector<std::byte> names;  // 64 each
    std::vector<std::uint64_t> frame_bytes;
    std::vector<std::uint32_t> free;  // ascending
};

// Entries from slot `first` on. One that does not verify, or of a frame of more than `stride` bytes, is free.
// std::invalid_argument when `entries` are not whole ones.
DaxDirectory read_dax_directory(std::span<const std::byte, kDaxIdBytes> device, std::uint64_t first,
                                std::span<const std::byte> entries, std::uint64_t stride);

}  // namespace lmcache
