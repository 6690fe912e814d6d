#include "lmcache/frame.h"

#include <nanobind/stl/string.h>

#include <cstring>
#include <span>

#include "bindings.h"
#include "lmcache/copy.h"

namespace {

using Hash = Packed<std::byte, "chunk_hash">;
using Digest = Packed<std::byte, "namespace_digest">;

nb::typed<nb::dict, nb::str, nb::object> parse(const Packed<std::byte, "header">& bytes) {
    if (bytes.size() < sizeof(lmcache::FrameHeader)) throw std::invalid_argument("a frame header has 4096 bytes");
    lmcache::FrameHeader header;
    std::memcpy(&header, bytes.data(), sizeof header);
    if (const auto fault = lmcache::frame_check_format(header); fault != lmcache::FrameFault::kNone)
        throw std::invalid_argument(std::string("not a frame header: wrong ") + lmcache::frame_fault_name(fault));
    nb::typed<nb::dict, nb::str, nb::object> fields;
    fields["version"] = header.version;
    fields["payload_bytes"] = header.payload_bytes;
    fields["namespace"] = nb::bytes(header.name_space, header.namespace_bytes);
    fields["namespace_digest"] = nb::bytes(header.namespace_digest, sizeof header.namespace_digest);
    fields["chunk_hash"] = nb::bytes(header.chunk_hash, sizeof header.chunk_hash);
    fields["serde"] = nb::str(header.serde, strnlen(header.serde, sizeof header.serde));
    fields["serde_params"] = nb::bytes(header.serde_params, header.serde_params_bytes);
    fields["payload_checksum"] = nb::bytes(header.payload_checksum, sizeof header.payload_checksum);
    return fields;
}

std::vector<const char*> verify(const Ranges& frames, const Packed<std::byte, "namespace_digests">& namespace_digests,
                                const Packed<std::byte, "hashes">& hashes) {
    const std::size_t count = frames.addresses.size();
    if (namespace_digests.size() != 32 * count || hashes.size() != 32 * count)
        throw std::invalid_argument("there must be a digest and a hash of 32 bytes for each of frames");
    std::vector<const char*> faults(count);
    for (std::size_t i = 0; i < count; ++i) {
        faults[i] = lmcache::frame_fault_name(
            lmcache::frame_verify(memory_at(frames.addresses[i]), frames.sizes[i],
                                  std::span<const std::byte, 32>(namespace_digests.data() + 32 * i, 32),
                                  std::span<const std::byte, 32>(hashes.data() + 32 * i, 32)));
    }
    return faults;
}

void copy_plain(std::uintptr_t destination, std::uintptr_t source, std::size_t size_bytes, const std::string& path) {
    if (!path.empty() && path != "memcpy" && path != "stream")
        throw std::invalid_argument("path must be \"memcpy\", \"stream\" or \"\"");
    if (path == "memcpy") {
        std::memcpy(memory_at(destination), memory_at(source), size_bytes);
    } else {
        lmcache::best_copy_kernels().stream(memory_at(destination), memory_at(source), size_bytes);
        lmcache::store_fence();
    }
}

auto copy_with_checksum(std::uintptr_t destination, std::uintptr_t source, std::size_t size_bytes) {
    lmcache::LaneChecksum sum;
    lmcache::best_copy_kernels().copy_runs(
        {.source = memory_at(source), .destination = memory_at(destination), .run_bytes = size_bytes, .count = 1}, sum,
        lmcache::StoreKind::kStreaming);
    lmcache::store_fence();
    return AsBytes{sum.finish()};
}

void bind_parts(nb::module_& m) {
    m.def(
        "frame_write_part",
        [](std::uintptr_t frame_address, std::uint64_t offset, const Packed<std::byte, "part">& part) {
            lmcache::frame_write_part(memory_at(frame_address), offset, part);
        },
        nb::arg("frame_address"), nb::arg("offset"), nb::arg("part"), ReleaseGil(),
        "Copies a part of a frame to its place (no GIL). The part at offset 0 first makes the memory no frame. The "
        "caller answers for the range.");
    m.def(
        "frame_read_part",
        [](std::uintptr_t frame_address, std::uint64_t available_bytes, std::uint64_t offset,
           const Packed<std::byte, "part", Access::kWrite>& part, const Digest& namespace_digest,
           const Hash& chunk_hash) {
            return lmcache::frame_fault_name(lmcache::frame_read_part(memory_at(frame_address), available_bytes, offset,
                                                                      part, namespace_digest, chunk_hash));
        },
        nb::arg("frame_address"), nb::arg("available_bytes"), nb::arg("offset"), nb::arg("part"),
        nb::arg("namespace_digest"), nb::arg("chunk_hash"), ReleaseGil(),
        "Fills the writable `part` from `offset` of the frame (no GIL). \"\" if the header that the key names was "
        "there before and after, else the reason as `verify_frames` has it; then `part` holds garbage. The payload is "
        "not checked.");
}

}  // namespace

void bind_frame(nb::module_& m) {
    m.def(
        "frame_template",
        [](const Packed<std::byte, "namespace">& name_space, const Digest& namespace_digest,
           std::uint64_t payload_bytes, const std::string& serde,
           const Packed<std::byte, "serde_params">& serde_params) {
            const lmcache::FrameHeader header =
                lmcache::frame_template(name_space, namespace_digest, payload_bytes, serde, serde_params);
            return nb::bytes(&header, sizeof header);
        },
        nb::arg("namespace"), nb::arg("namespace_digest"), nb::arg("payload_bytes"), nb::arg("serde") = "",
        maybe_empty("serde_params"),
        "A 4096-byte header, complete but for chunk hash, payload checksum and header checksum.");
    m.def(
        "frame_seal",
        [](std::uintptr_t frame_address, const Packed<std::byte, "template">& frame_template, const Hash& chunk_hash) {
            const lmcache::FrameHeader header = lmcache::frame_template_from_bytes(frame_template);
            lmcache::frame_seal(memory_at(frame_address), header, chunk_hash);
        },
        nb::arg("frame_address"), nb::arg("template"), nb::arg("chunk_hash"), ReleaseGil(),
        "Computes the checksum of the payload that already lies behind the header and writes the header (no GIL).");
    m.def("verify_frames", verify, nb::arg("frames"), nb::arg("namespace_digests"), nb::arg("hashes"), ReleaseGil(),
          "For each frame \"\" if header and payload are what its key says (32 + 32 bytes each), else the reason: "
          "\"magic\", \"version\", \"header checksum\", \"namespace\", \"chunk hash\", \"length\", \"payload "
          "checksum\". A frame may be shorter than its buffer.");
    m.def("frame_parse", parse, nb::arg("header"),
          "Fields of a header whose own checksum holds, else ValueError: version, payload_bytes, namespace (bytes), "
          "namespace_digest, chunk_hash, serde, serde_params, payload_checksum.");
    m.def(
        "payload_checksum",
        [](const Packed<std::byte, "data">& data) { return AsBytes{lmcache::payload_checksum(data)}; }, nb::arg("data"),
        ReleaseGil(), "16 bytes: four CRC-32C over interleaved 8-byte words (docs/formats/frame.md).");
    bind_parts(m);
    m.def("copy_with_checksum", copy_with_checksum, nb::arg("destination"), nb::arg("source"), nb::arg("size_bytes"),
          ReleaseGil(),
          "One streaming copy with the checksum fused in, on the calling thread. For benchmarks and tests.");
    m.def("copy_plain", copy_plain, nb::arg("destination"), nb::arg("source"), nb::arg("size_bytes"),
          nb::arg("path") = "", ReleaseGil(),
          "One copy on the calling thread by `path` (\"memcpy\", \"stream\" or \"\" for the best).");
}
