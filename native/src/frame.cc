#include "lmcache/frame.h"

#include <cstring>
#include <stdexcept>

#include "lmcache/copy.h"

namespace lmcache {
namespace {

constexpr std::size_t kFirstLineBytes = 64;

std::span<const std::byte> checksummed_bytes(const FrameHeader& header) {
    return {reinterpret_cast<const std::byte*>(&header), offsetof(FrameHeader, header_checksum)};
}

template <std::size_t kSize>
bool same(const std::uint8_t (&field)[kSize], std::span<const std::byte, kSize> expected) {
    return std::memcmp(field, expected.data(), kSize) == 0;
}

std::invalid_argument too_long(const char* what, std::size_t limit) {
    return std::invalid_argument(std::string(what) + " must not exceed " + std::to_string(limit) + " bytes");
}

}  // namespace

const char* frame_fault_name(FrameFault fault) {
    switch (fault) {
        case FrameFault::kNone:
            return "";
        case FrameFault::kMagic:
            return "magic";
        case FrameFault::kVersion:
            return "version";
        case FrameFault::kHeaderChecksum:
            return "header checksum";
        case FrameFault::kNamespace:
            return "namespace";
        case FrameFault::kChunkHash:
            return "chunk hash";
        case FrameFault::kLength:
            return "length";
        case FrameFault::kPayloadChecksum:
            return "payload checksum";
    }
    return "";
}

FrameHeader frame_template(std::span<const std::byte> name_space, std::span<const std::byte> namespace_digest,
                           std::uint64_t payload_bytes, std::string_view serde,
                           std::span<const std::byte> serde_params) {
    if (name_space.size() > kMaxNamespaceBytes) throw too_long("namespace", kMaxNamespaceBytes);
    if (serde.size() > kMaxSerdeNameBytes) throw too_long("serde", kMaxSerdeNameBytes);
    if (serde_params.size() > kMaxSerdeParamsBytes) throw too_long("serde_params", kMaxSerdeParamsBytes);
    if (payload_bytes > kMaxObjectBytes) throw too_long("payload_bytes", kMaxObjectBytes);
    if (namespace_digest.size() != kDigestBytes) throw std::invalid_argument("namespace_digest must be 32 bytes");
    for (const char c : serde) {
        if (c < '!' || c > '~') throw std::invalid_argument("serde must be printable ASCII without spaces");
    }
    FrameHeader header{};
    std::memcpy(header.magic, kFrameMagic, sizeof header.magic);
    header.version = kFrameVersion;
    header.header_bytes = kFrameHeaderBytes;
    header.payload_bytes = payload_bytes;
    std::memcpy(header.namespace_digest, namespace_digest.data(), kDigestBytes);
    header.namespace_bytes = static_cast<std::uint32_t>(name_space.size());
    header.serde_params_bytes = static_cast<std::uint32_t>(serde_params.size());
    if (!serde.empty()) std::memcpy(header.serde, serde.data(), serde.size());
    if (!name_space.empty()) std::memcpy(header.name_space, name_space.data(), name_space.size());
    if (!serde_params.empty()) std::memcpy(header.serde_params, serde_params.data(), serde_params.size());
    return header;
}

FrameHeader frame_template_from_bytes(std::span<const std::byte> bytes) {
    FrameHeader header;
    if (bytes.size() != sizeof header)
        throw std::invalid_argument("template must be 4096 bytes, made by frame_template");
    std::memcpy(&header, bytes.data(), sizeof header);
    if (std::memcmp(header.magic, kFrameMagic, sizeof header.magic) != 0 || header.version != kFrameVersion) {
        throw std::invalid_argument("template was not made by frame_template of this version");
    }
    return header;
}

void frame_invalidate(std::byte* frame) {
    std::memset(frame, 0, sizeof FrameHeader::magic);
    store_fence();
}

void frame_publish(std::byte* frame, const FrameHeader& frame_template,
                   std::span<const std::byte, kChunkHashBytes> chunk_hash, const PayloadChecksum& checksum) {
    FrameHeader header = frame_template;
    std::memcpy(header.chunk_hash, chunk_hash.data(), kChunkHashBytes);
    std::memcpy(header.payload_checksum, checksum.data(), kChecksumBytes);
    header.header_checksum = crc32c(checksummed_bytes(header));
    // Past the caches like the payload: nobody reads it soon, and its old content need not be fetched. Only the first
    // cache line is already here, from frame_invalidate.
    const auto* const bytes = reinterpret_cast<const std::byte*>(&header);
    best_copy_kernels().stream(frame + kFirstLineBytes, bytes + kFirstLineBytes, sizeof header - kFirstLineBytes);
    std::memcpy(frame + sizeof header.magic, bytes + sizeof header.magic, kFirstLineBytes - sizeof header.magic);
    store_fence();
    std::memcpy(frame, header.magic, sizeof header.magic);
}

FrameFault frame_check_format(const FrameHeader& header) {
    if (std::memcmp(header.magic, kFrameMagic, sizeof header.magic) != 0) return FrameFault::kMagic;
    if (header.version != kFrameVersion) return FrameFault::kVersion;
    if (header.header_checksum != crc32c(checksummed_bytes(header))) return FrameFault::kHeaderChecksum;
    if (header.header_bytes != kFrameHeaderBytes) return FrameFault::kVersion;
    if (header.payload_bytes > kMaxObjectBytes || header.namespace_bytes > kMaxNamespaceBytes ||
        header.serde_params_bytes > kMaxSerdeParamsBytes) {
        return FrameFault::kLength;
    }
    return FrameFault::kNone;
}

FrameFault frame_check_header(const FrameHeader& header, std::uint64_t payload_capacity,
                              std::span<const std::byte, kDigestBytes> namespace_digest,
                              std::span<const std::byte, kChunkHashBytes> chunk_hash) {
    if (const FrameFault fault = frame_check_format(header); fault != FrameFault::kNone) return fault;
    if (!same(header.namespace_digest, namespace_digest)) return FrameFault::kNamespace;
    if (!same(header.chunk_hash, chunk_hash)) return FrameFault::kChunkHash;
    if (header.payload_bytes > payload_capacity) return FrameFault::kLength;
    return FrameFault::kNone;
}

bool frame_header_unchanged(const std::byte* frame, const FrameHeader& copy) {
    load_fence();
    return std::memcmp(frame, &copy, sizeof copy) == 0;
}

void frame_seal(std::byte* frame, const FrameHeader& frame_template,
                std::span<const std::byte, kChunkHashBytes> chunk_hash) {
    const PayloadChecksum checksum =
        payload_checksum({frame + kFrameHeaderBytes, static_cast<std::size_t>(frame_template.payload_bytes)});
    frame_publish(frame, frame_template, chunk_hash, checksum);
}

FrameFault frame_verify(const std::byte* frame, std::uint64_t available_bytes,
                        std::span<const std::byte, kDigestBytes> namespace_digest,
                        std::span<const std::byte, kChunkHashBytes> chunk_hash) {
    if (available_bytes < kFrameHeaderBytes) return FrameFault::kLength;
    FrameHeader header;
    std::memcpy(&header, frame, sizeof header);
    const FrameFault fault =
        frame_check_header(header, available_bytes - kFrameHeaderBytes, namespace_digest, chunk_hash);
    if (fault != FrameFault::kNone) return fault;
    const PayloadChecksum found =
        payload_checksum({frame + kFrameHeaderBytes, static_cast<std::size_t>(header.payload_bytes)});
    return std::memcmp(found.data(), header.payload_checksum, kChecksumBytes) == 0 ? FrameFault::kNone
                                                                                   : FrameFault::kPayloadChecksum;
}

FrameFault frame_copy_verified(std::byte* frame, const std::byte* source, std::uint64_t frame_bytes,
                               std::span<const std::byte, kDigestBytes> namespace_digest,
                               std::span<const std::byte, kChunkHashBytes> chunk_hash) {
    if (frame_bytes < kFrameHeaderBytes) return FrameFault::kLength;
    FrameHeader header;
    std::memcpy(&header, source, sizeof header);
    const FrameFault fault = frame_check_header(header, frame_bytes - kFrameHeaderBytes, namespace_digest, chunk_hash);
    if (fault != FrameFault::kNone) return fault;
    std::memcpy(frame, &header, sizeof header);
    const auto payload_bytes = static_cast<std::size_t>(header.payload_bytes);
    const std::uint64_t end = kFrameHeaderBytes + header.payload_bytes;
    LaneChecksum sum;
    best_copy_kernels().copy_runs({.source = source + kFrameHeaderBytes,
                                   .destination = frame + kFrameHeaderBytes,
                                   .run_bytes = payload_bytes,
                                   .count = 1},
                                  sum, StoreKind::kStreaming);
    std::memcpy(frame + end, source + end, frame_bytes - end);
    store_fence();
    const PayloadChecksum found = sum.finish();
    return std::memcmp(found.data(), header.payload_checksum, kChecksumBytes) == 0 ? FrameFault::kNone
                                                                                   : FrameFault::kPayloadChecksum;
}

PayloadChecksum payload_checksum(std::span<const std::byte> payload) {
    LaneChecksum sum;
    best_copy_kernels().copy_runs({.source = payload.data(), .run_bytes = payload.size(), .count = 1}, sum,
                                  StoreKind::kChecksumOnly);
    return sum.finish();
}

void frame_write_part(std::byte* frame, std::uint64_t offset, std::span<const std::byte> part) {
    if (offset == 0) frame_invalidate(frame);
    best_copy_kernels().stream(frame + offset, part.data(), part.size());
    store_fence();
}

FrameFault frame_read_part(const std::byte* frame, std::uint64_t available_bytes, std::uint64_t offset,
                           std::span<std::byte> part, std::span<const std::byte, kDigestBytes> namespace_digest,
                           std::span<const std::byte, kChunkHashBytes> chunk_hash) {
    if (available_bytes < kFrameHeaderBytes) return FrameFault::kLength;
    FrameHeader header;
    std::memcpy(&header, frame, sizeof header);
    const FrameFault fault =
        frame_check_header(header, available_bytes - kFrameHeaderBytes, namespace_digest, chunk_hash);
    if (fault != FrameFault::kNone) return fault;
    const std::uint64_t frame_bytes = kFrameHeaderBytes + header.payload_bytes;
    if (offset > frame_bytes || part.size() > frame_bytes - offset) return FrameFault::kLength;
    std::memcpy(part.data(), frame + offset, part.size());
    return frame_header_unchanged(frame, header) ? FrameFault::kNone : FrameFault::kMagic;
}

}  // namespace lmcache
