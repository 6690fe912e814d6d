#include "lmcache/slot_header.h"

#include <algorithm>
#include <cstring>

#include "lmcache/checksum.h"

namespace lmcache {
namespace {

static_assert(sizeof(SlotPlace) == 32 && sizeof(SlotPlace) <= sizeof FrameHeader::reserved);

std::uint32_t checksum_of(const FrameHeader& header) {
    return crc32c({reinterpret_cast<const std::byte*>(&header), offsetof(FrameHeader, header_checksum)});
}

SlotVerdict frame_fault(FrameFault fault) {
    return {fault == FrameFault::kNone ? SlotFault::kNone : SlotFault::kFrame, fault};
}

}  // namespace

const char* slot_fault_name(const SlotVerdict& verdict) {
    switch (verdict.fault) {
        case SlotFault::kNone:
            return "";
        case SlotFault::kFrame:
            return frame_fault_name(verdict.frame_fault);
        case SlotFault::kDevice:
            return "device";
        case SlotFault::kSlot:
            return "slot";
        case SlotFault::kGeneration:
            return "generation";
    }
    return "";
}

SlotVerdict slot_header_seal(const std::byte* frame, std::uint64_t frame_bytes, std::byte* head, const SlotPlace& place,
                             std::span<const std::byte, kDigestBytes> namespace_digest,
                             std::span<const std::byte, kChunkHashBytes> chunk_hash) {
    if (frame_bytes < kFrameHeaderBytes) return frame_fault(FrameFault::kLength);
    FrameHeader header;
    std::memcpy(&header, frame, sizeof header);
    const FrameFault fault = frame_check_header(header, frame_bytes - kFrameHeaderBytes, namespace_digest, chunk_hash);
    if (fault != FrameFault::kNone) return frame_fault(fault);
    if (std::any_of(header.reserved, header.reserved + sizeof header.reserved, [](std::uint8_t byte) { return byte; }))
        return frame_fault(FrameFault::kVersion);
    std::memcpy(header.magic, kSlotMagic, sizeof header.magic);
    std::memcpy(header.reserved, &place, sizeof place);
    header.header_checksum = checksum_of(header);
    std::memcpy(head, &header, sizeof header);
    return {};
}

SlotVerdict slot_header_parse(FrameHeader& header, SlotPlace& place) {
    if (std::memcmp(header.magic, kSlotMagic, sizeof header.magic) != 0) return frame_fault(FrameFault::kMagic);
    if (header.header_checksum != checksum_of(header)) return frame_fault(FrameFault::kHeaderChecksum);
    std::memcpy(&place, header.reserved, sizeof place);
    std::memcpy(header.magic, kFrameMagic, sizeof header.magic);
    std::memset(header.reserved, 0, sizeof header.reserved);
    header.header_checksum = checksum_of(header);
    return frame_fault(frame_check_format(header));
}

SlotVerdict slot_header_open(std::byte* frame, std::uint64_t available_bytes, const SlotPlace& place,
                             std::span<const std::byte, kDigestBytes> namespace_digest,
                             std::span<const std::byte, kChunkHashBytes> chunk_hash) {
    if (available_bytes < kFrameHeaderBytes) return frame_fault(FrameFault::kLength);
    FrameHeader header;
    std::memcpy(&header, frame, sizeof header);
    SlotPlace found;
    if (const SlotVerdict verdict = slot_header_parse(header, found); verdict.fault != SlotFault::kNone) return verdict;
    if (std::memcmp(found.device, place.device, sizeof found.device) != 0) return {SlotFault::kDevice};
    if (found.slot != place.slot) return {SlotFault::kSlot};
    if (found.generation != place.generation) return {SlotFault::kGeneration};
    const FrameFault fault =
        frame_check_header(header, available_bytes - kFrameHeaderBytes, namespace_digest, chunk_hash);
    if (fault != FrameFault::kNone) return frame_fault(fault);
    std::memcpy(frame, &header, sizeof header);
    return {};
}

}  // namespace lmcache
