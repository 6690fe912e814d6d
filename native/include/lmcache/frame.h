// The frame header: what makes every stored object verifiable on its own (docs/formats/frame.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "lmcache/checksum.h"
#include "lmcache/limits.h"

namespace lmcache {

inline constexpr char kFrameMagic[8] = {'L', 'M', 'C', 'F', 'R', 'A', 'M', 'E'};
inline constexpr std::uint32_t kFrameVersion = 1;

// The first 4096 bytes of a frame, as they lie in memory and on every tier. Little-endian.
struct FrameHeader {
    char magic[8];
    std::uint32_t version;
    std::uint32_t header_bytes;
    std::uint64_t payload_bytes;
    std::uint8_t payload_checksum[kChecksumBytes];
    std::uint8_t chunk_hash[kChunkHashBytes];
    std::uint8_t namespace_digest[kDigestBytes];
    std::uint32_t namespace_bytes;
    std::uint32_t serde_params_bytes;
    char serde[kMaxSerdeNameBytes];  // ASCII, zero-padded; empty: the payload is raw
    std::uint8_t reserved[112];      // zero
    std::uint8_t name_space[kMaxNamespaceBytes];
    std::uint8_t serde_params[kMaxSerdeParamsBytes];
    std::uint32_t header_checksum;  // CRC-32C of all bytes before it
};
static_assert(sizeof(FrameHeader) == kFrameHeaderBytes);
static_assert(offsetof(FrameHeader, payload_checksum) == 24 && offsetof(FrameHeader, chunk_hash) == 40);
static_assert(offsetof(FrameHeader, namespace_digest) == 72 && offsetof(FrameHeader, namespace_bytes) == 104);
static_assert(offsetof(FrameHeader, serde) == 112 && offsetof(FrameHeader, name_space) == 256);
static_assert(offsetof(FrameHeader, serde_params) == 2304 && offsetof(FrameHeader, header_checksum) == 4092);

// Why a frame is not what a key says. The names are part of the Python interface.
enum class FrameFault { kNone, kMagic, kVersion, kHeaderChecksum, kNamespace, kChunkHash, kLength, kPayloadChecksum };
const char* frame_fault_name(FrameFault fault);  // "" for kNone

// A header complete but for chunk hash, payload checksum and header checksum. Throws std::invalid_argument over a
// limit.
FrameHeader frame_template(std::span<const std::byte> name_space, std::span<const std::byte> namespace_digest,
                           std::uint64_t payload_bytes, std::string_view serde,
                           std::span<const std::byte> serde_params);

// Reads a template made by frame_template from packed bytes. Throws std::invalid_argument when it is none.
FrameHeader frame_template_from_bytes(std::span<const std::byte> bytes);

// Marks a frame's memory as no frame, before its payload is overwritten: a reader that still copies from it will
// notice.
void frame_invalidate(std::byte* frame);

// Completes the header and writes it in front of a payload that has been written by this thread: all of it is visible
// to other processes before the header is. The magic goes last.
void frame_publish(std::byte* frame, const FrameHeader& frame_template,
                   std::span<const std::byte, kChunkHashBytes> chunk_hash, const PayloadChecksum& checksum);

// Whether a header (a private copy) belongs to this key and its payload fits into `payload_capacity` bytes. Does not
// look at the payload.
FrameFault frame_check_header(const FrameHeader& header, std::uint64_t payload_capacity,
                              std::span<const std::byte, kDigestBytes> namespace_digest,
                              std::span<const std::byte, kChunkHashBytes> chunk_hash);

// Magic, version and header checksum, and that the stored lengths are within their limits.
FrameFault frame_check_format(const FrameHeader& header);

// Whether the header in front of a payload still is what `copy` took from it, after all reads of this thread so far.
bool frame_header_unchanged(const std::byte* frame, const FrameHeader& copy);

// frame_publish with the checksum of the payload that already lies behind the header.
void frame_seal(std::byte* frame, const FrameHeader& frame_template,
                std::span<const std::byte, kChunkHashBytes> chunk_hash);

// Header and payload. `available_bytes` is how much memory may be read at `frame`.
FrameFault frame_verify(const std::byte* frame, std::uint64_t available_bytes,
                        std::span<const std::byte, kDigestBytes> namespace_digest,
                        std::span<const std::byte, kChunkHashBytes> chunk_hash);

// frame_verify and, in the same pass, a copy of all `frame_bytes` from `source`. With a fault the copy is incomplete.
FrameFault frame_copy_verified(std::byte* frame, const std::byte* source, std::uint64_t frame_bytes,
                               std::span<const std::byte, kDigestBytes> namespace_digest,
                               std::span<const std::byte, kChunkHashBytes> chunk_hash);

PayloadChecksum payload_checksum(std::span<const std::byte> payload);

// Parts of whole frames, for those who cannot map the memory. A frame is written from its start on; the memory stops
// being the frame that it was before any other byte changes, as with frame_invalidate.
void frame_write_part(std::byte* frame, std::uint64_t offset, std::span<const std::byte> part);

// Copies part.size() bytes at `offset` out. Without a fault they belong to the frame that the key names: its header was
// there before the copy and is unchanged after it. The payload is not checked.
FrameFault frame_read_part(const std::byte* frame, std::uint64_t available_bytes, std::uint64_t offset,
                           std::span<std::byte> part, std::span<const std::byte, kDigestBytes> namespace_digest,
                           std::span<const std::byte, kChunkHashBytes> chunk_hash);

}  // namespace lmcache
