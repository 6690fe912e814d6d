// The directory of a DAX device (docs/formats/dax.md): the entries of its slots.
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

// CRC-32 as in zlib. `crc`: of the bytes before these, 0 at first.
std::uint32_t crc32_zlib(std::span<const std::byte> bytes, std::uint32_t crc = 0);

struct DaxDirectory {
    // Objects, last used first.
    std::vector<std::uint32_t> slots;
    std::vector<std::byte> names;  // 64 each
    std::vector<std::uint64_t> frame_bytes;
    std::vector<std::uint32_t> free;  // ascending
};

// The entries of slots, which hold the frames with these names (64 bytes each). `used_ns`: of the first; each one is a
// microsecond older than the one before. std::invalid_argument for lists of different lengths.
std::vector<std::byte> make_dax_entries(std::span<const std::byte, kDaxIdBytes> device,
                                        std::span<const std::uint64_t> slots, std::span<const std::byte> names,
                                        std::span<const std::uint64_t> frame_bytes, std::uint64_t used_ns);

// Reads the entries of all slots. One that does not verify, or of a frame of more than `stride` bytes, is free.
// std::invalid_argument when `entries` are not whole ones.
DaxDirectory read_dax_directory(std::span<const std::byte, kDaxIdBytes> device, std::span<const std::byte> entries,
                                std::uint64_t stride);

}  // namespace lmcache
