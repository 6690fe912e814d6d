// The header of a slot on a raw device: the frame's own, with another magic and the place that it was written for
// (docs/formats/raw_block.md). It tells frames that were written for another device, slot or generation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lmcache/frame.h"

namespace lmcache {

inline constexpr char kSlotMagic[8] = {'L', 'M', 'C', 'S', 'L', 'O', 'T', '1'};
inline constexpr std::size_t kDeviceIdBytes = 16;

// In those bytes of a frame header that are reserved, and zero, in a frame.
struct SlotPlace {
    std::uint8_t device[kDeviceIdBytes];
    std::uint64_t slot;
    std::uint64_t generation;
};

enum class SlotFault { kNone, kFrame, kDevice, kSlot, kGeneration };

struct SlotVerdict {
    SlotFault fault = SlotFault::kNone;
    FrameFault frame_fault = FrameFault::kNone;  // where `fault` is kFrame
};
const char* slot_fault_name(const SlotVerdict& verdict);  // "" for none

// Fills `head` (4096 bytes) with the slot header of the frame at `frame`, `frame_bytes` long. The frame must be the
// key's and have zeros where the place goes; else `head` is undefined.
SlotVerdict slot_header_seal(const std::byte* frame, std::uint64_t frame_bytes, std::byte* head, const SlotPlace& place,
                             std::span<const std::byte, kDigestBytes> namespace_digest,
                             std::span<const std::byte, kChunkHashBytes> chunk_hash);

// Turns the content of a slot back into the frame that was stored, byte for byte, if it is the one of this place and
// key; else leaves it as it is. `available_bytes`: how much was read.
SlotVerdict slot_header_open(std::byte* frame, std::uint64_t available_bytes, const SlotPlace& place,
                             std::span<const std::byte, kDigestBytes> namespace_digest,
                             std::span<const std::byte, kChunkHashBytes> chunk_hash);

// Reads any slot header: fills `place` and turns `header` into that of the frame.
SlotVerdict slot_header_parse(FrameHeader& header, SlotPlace& place);

}  // namespace lmcache
