// One stage of a serde: what becomes of a payload on its way to a tier, and back (docs/formats/serde.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "lmcache/limits.h"

namespace lmcache {

// What a stage may depend on besides its settings: the object, as it is served, and what the header already says of how
// it was encoded. All of it is the same when the object is decoded; a stage that authenticates covers it.
struct SerdeObject {
    std::span<const std::byte> name_space;  // Namespace.encode()
    std::span<const std::byte, kDigestBytes> namespace_digest;
    std::span<const std::byte, kChunkHashBytes> chunk_hash;
    std::span<const std::byte> earlier_parameters;  // what the stages before this one wrote, and what precedes them
};

// kUnreadable: written with a key or in a version that this stage does not have; the object is whole and stays.
enum class SerdeFault : std::uint8_t { kNone, kCorrupt, kUnreadable, kFailed };
const char* serde_fault_name(SerdeFault fault);  // "" for kNone

// Called by several threads at once. Sources and destinations do not overlap.
class SerdeStage {
public:
    virtual ~SerdeStage() = default;

    // Whether encode() may return nullopt. A frame that says so of a stage that may not is corrupt: nobody can replace
    // an encrypted object by a plain one.
    virtual bool may_leave_source() const { return true; }

    // Whether decode() gives something else than what was encoded. It always gives the same for the same bytes, on any
    // machine: that is what a loaded payload is compared with.
    virtual bool is_lossy() const { return false; }

    // The most that encode() writes for a source of that size.
    virtual std::size_t max_encoded_bytes(std::size_t source_bytes) const = 0;

    // Returns how much it wrote, and appends to `parameters` what decode() needs. nullopt: the stage has nothing to
    // gain here, and the source stands for its result; `destination` may hold anything then. An exception fails the
    // object.
    virtual std::optional<std::size_t> encode(std::span<const std::byte> source, std::span<std::byte> destination,
                                              const SerdeObject& object, std::vector<std::byte>& parameters) const = 0;

    // Fills `destination`, which has the size of what was encoded. Source and parameters may be anything.
    virtual SerdeFault decode(std::span<const std::byte> source, std::span<std::byte> destination,
                              const SerdeObject& object, std::span<const std::byte> parameters) const = 0;
};

}  // namespace lmcache
