#include "lmcache/frame.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <span>
#include <vector>

#include "bindings.h"
#include "lmcache/copy.h"

namespace {

std::span<const std::byte> bytes_of(const nb::bytes& bytes) {
    return {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
}

std::span<const std::byte, 32> bytes32_of(const nb::bytes& bytes, const char* name) {
    if (bytes.size() != 32) throw std::invalid_argument(std::string(name) + " must be 32 bytes");
    return std::span<const std::byte, 32>(bytes_of(bytes).data(), 32);
}

nb::dict parse(const lmcache::FrameHeader& header) {
    nb::dict fields;
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

std::vector<std::string> verify(const nb::list& frames, nb::handle namespace_digests, nb::handle hashes) {
    const Ranges ranges(frames);
    const PackedView<std::byte> digest_view(namespace_digests, "namespace_digests");
    const PackedView<std::byte> hash_view(hashes, "hashes");
    const std::size_t count = ranges.addresses.size();
    if (digest_view.size() != 32 * count || hash_view.size() != 32 * count) {
        throw std::invalid_argument("there must be a digest and a hash of 32 bytes for each of frames");
    }
    std::vector<std::string> faults(count);
    nb::gil_scoped_release release;
    for (std::size_t i = 0; i < count; ++i) {
        faults[i] = lmcache::frame_fault_name(
            lmcache::frame_verify(reinterpret_cast<const std::byte*>(ranges.addresses[i]), ranges.sizes[i],
                                  std::span<const std::byte, 32>(digest_view.data() + 32 * i, 32),
                                  std::span<const std::byte, 32>(hash_view.data() + 32 * i, 32)));
    }
    return faults;
}

void copy_plain(std::uintptr_t destination, std::uintptr_t source, std::size_t size_bytes, const std::string& path) {
    auto* const to = reinterpret_cast<std::byte*>(destination);
    const auto* const from = reinterpret_cast<const std::byte*>(source);
    if (!path.empty() && path != "memcpy" && path != "stream") {
        throw std::invalid_argument("path must be \"memcpy\", \"stream\" or \"\"");
    }
    nb::gil_scoped_release release;
    if (path == "memcpy") {
        std::memcpy(to, from, size_bytes);
    } else {
        lmcache::best_copy_kernels().stream(to, from, size_bytes);
        lmcache::store_fence();
    }
}

nb::bytes copy_with_checksum(std::uintptr_t destination, std::uintptr_t source, std::size_t size_bytes) {
    lmcache::PayloadChecksum checksum;
    {
        nb::gil_scoped_release release;
        lmcache::LaneChecksum sum;
        lmcache::best_copy_kernels().copy_runs({.source = reinterpret_cast<const std::byte*>(source),
                                                .destination = reinterpret_cast<std::byte*>(destination),
                                                .run_bytes = size_bytes,
                                                .count = 1},
                                               sum, lmcache::StoreKind::kStreaming);
        lmcache::store_fence();
        checksum = sum.finish();
    }
    return nb::bytes(checksum.data(), checksum.size());
}

}  // namespace

void bind_frame(nb::module_& m) {
    m.def(
        "frame_template",
        [](const nb::bytes& name_space, const nb::bytes& namespace_digest, std::uint64_t payload_bytes,
           const std::string& serde, const nb::bytes& serde_params) {
            const lmcache::FrameHeader header = lmcache::frame_template(
                bytes_of(name_space), bytes_of(namespace_digest), payload_bytes, serde, bytes_of(serde_params));
            return nb::bytes(&header, sizeof header);
        },
        nb::arg("namespace"), nb::arg("namespace_digest"), nb::arg("payload_bytes"), nb::arg("serde") = "",
        nb::arg("serde_params") = nb::bytes("", 0));
    m.def(
        "frame_seal",
        [](std::uintptr_t frame_address, const nb::bytes& frame_template, const nb::bytes& chunk_hash) {
            const lmcache::FrameHeader header = lmcache::frame_template_from_bytes(bytes_of(frame_template));
            const auto hash = bytes32_of(chunk_hash, "chunk_hash");
            nb::gil_scoped_release release;
            lmcache::frame_seal(reinterpret_cast<std::byte*>(frame_address), header, hash);
        },
        nb::arg("frame_address"), nb::arg("template"), nb::arg("chunk_hash"));
    m.def("verify_frames", verify, nb::arg("frames"), nb::arg("namespace_digests"), nb::arg("hashes"));
    m.def(
        "frame_parse",
        [](nb::object header) {
            const PackedView<std::byte> view(header, "header");
            if (view.size() < sizeof(lmcache::FrameHeader))
                throw std::invalid_argument("a frame header has 4096 bytes");
            lmcache::FrameHeader copy;
            std::memcpy(&copy, view.data(), sizeof copy);
            const lmcache::FrameFault fault = lmcache::frame_check_format(copy);
            if (fault != lmcache::FrameFault::kNone) {
                throw std::invalid_argument(std::string("not a frame header: wrong ") +
                                            lmcache::frame_fault_name(fault));
            }
            return parse(copy);
        },
        nb::arg("header"));
    m.def(
        "payload_checksum",
        [](nb::object data) {
            const PackedView<std::byte> view(data, "data");
            lmcache::PayloadChecksum checksum;
            {
                nb::gil_scoped_release release;
                checksum = lmcache::payload_checksum({view.data(), view.size()});
            }
            return nb::bytes(checksum.data(), checksum.size());
        },
        nb::arg("data"));
    m.def(
        "frame_write_part",
        [](std::uintptr_t frame_address, std::uint64_t offset, nb::object part) {
            const PackedView<std::byte> view(part, "part");
            nb::gil_scoped_release release;
            lmcache::frame_write_part(reinterpret_cast<std::byte*>(frame_address), offset, {view.data(), view.size()});
        },
        nb::arg("frame_address"), nb::arg("offset"), nb::arg("part"));
    m.def(
        "frame_read_part",
        [](std::uintptr_t frame_address, std::uint64_t available_bytes, std::uint64_t offset, nb::object part,
           const nb::bytes& namespace_digest, const nb::bytes& chunk_hash) {
            const PackedView<std::byte> view(part, "part", true);
            const auto digest = bytes32_of(namespace_digest, "namespace_digest");
            const auto hash = bytes32_of(chunk_hash, "chunk_hash");
            nb::gil_scoped_release release;
            return lmcache::frame_fault_name(
                lmcache::frame_read_part(reinterpret_cast<const std::byte*>(frame_address), available_bytes, offset,
                                         {const_cast<std::byte*>(view.data()), view.size()}, digest, hash));
        },
        nb::arg("frame_address"), nb::arg("available_bytes"), nb::arg("offset"), nb::arg("part"),
        nb::arg("namespace_digest"), nb::arg("chunk_hash"));
    m.def("copy_with_checksum", copy_with_checksum, nb::arg("destination"), nb::arg("source"), nb::arg("size_bytes"));
    m.def("copy_plain", copy_plain, nb::arg("destination"), nb::arg("source"), nb::arg("size_bytes"),
          nb::arg("path") = "");
}
