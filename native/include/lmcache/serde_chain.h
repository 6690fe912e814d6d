// Frames on their way to a tier and back: a payload goes through stages, and what comes out is a frame again
// (docs/formats/serde.md).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lmcache/frame.h"
#include "lmcache/serde_stage.h"

namespace lmcache {

inline constexpr std::size_t kMaxSerdeStages = 8;

// The two namespaces of an object, as templates without a payload size: `served` is that of the frame in L1, `stored`
// that of the encoded one.
struct SerdeTemplates {
    FrameHeader served, stored;
};

struct SerdeResult {
    SerdeFault fault = SerdeFault::kNone;
    std::uint64_t frame_bytes = 0;  // that were written; 0 with a fault
};

// Thread-safe.
class SerdeChain {
public:
    // `name` identifies the stages in a frame's header. Throws std::invalid_argument.
    SerdeChain(std::string name, std::vector<std::shared_ptr<const SerdeStage>> stages);

    const std::string& name() const { return name_; }

    // Memory that encode() needs for a frame of that size.
    std::uint64_t max_frame_bytes(std::uint64_t served_frame_bytes) const;

    // Encodes a served frame. The payload of `source` is not verified: what the header says of it is kept, and a
    // decoded payload is compared with that. Where a stage is lossy the payload is verified, and what is decoded later
    // is compared with what this call decodes. What is written is a multiple of kFrameAlignBytes, zeros at its end.
    SerdeResult encode(std::span<const std::byte> source, std::span<std::byte> destination,
                       const SerdeTemplates& templates, std::span<const std::byte, kChunkHashBytes> chunk_hash) const;

    // Verifies a stored frame, decodes it, verifies the outcome and writes its frame. With a fault `destination` is no
    // frame. `source` may hold anything, and more than the frame.
    SerdeResult decode(std::span<const std::byte> source, std::span<std::byte> destination,
                       const SerdeTemplates& templates, std::span<const std::byte, kChunkHashBytes> chunk_hash) const;

private:
    std::string name_;
    std::vector<std::shared_ptr<const SerdeStage>> stages_;
    std::size_t lossy_end_ = 0;  // behind the last lossy stage; 0: none is
};

}  // namespace lmcache
