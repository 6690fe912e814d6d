#include "lmcache/frame_stream.h"

#include <nanobind/stl/string.h>

#include "bindings.h"
#include "lmcache/frame_copier.h"

namespace {

using Addresses = Packed<std::uint64_t, "addresses">;
using Sizes = Packed<std::uint64_t, "sizes">;
using Digests = Packed<std::byte, "namespace_digests">;
using ChunkHashes = Packed<std::byte, "chunk_hashes">;

std::vector<const char*> names_of(const std::vector<lmcache::FrameFault>& faults) {
    std::vector<const char*> names;
    names.reserve(faults.size());
    for (const auto fault : faults) names.push_back(lmcache::frame_fault_name(fault));
    return names;
}

void bind_copier(nb::module_& m) {
    using lmcache::FrameCopier;
    nb::class_<FrameCopier> copier(
        m, "FrameCopier",
        "Copies frames out of memory that another process has mapped, on native threads; completion is signalled by an "
        "eventfd. The mapping may change or be cut off meanwhile: what counts as copied is a whole frame of its key.");
    copier.def(nb::init<unsigned>(), nb::arg("threads"))
        .def(
            "submit",
            [](FrameCopier& self, const Addresses& addresses, const Sizes& sizes, const Digests& namespace_digests,
               const ChunkHashes& chunk_hashes, const Packed<std::uint64_t, "sources">& sources,
               std::uintptr_t mapping_address, std::size_t mapping_bytes) {
                auto job = std::make_shared<lmcache::FrameCopyJob>();
                job->addresses = addresses;
                job->sizes = sizes;
                job->namespace_digests = namespace_digests;
                job->chunk_hashes = chunk_hashes;
                job->sources = sources;
                job->mapping = memory_at(mapping_address);
                job->mapping_bytes = mapping_bytes;
                return self.submit(std::move(job));
            },
            nb::arg("addresses"), nb::arg("sizes"), nb::arg("namespace_digests"), nb::arg("chunk_hashes"),
            nb::arg("sources"), nb::arg("mapping_address"), nb::arg("mapping_bytes"), ReleaseGil(),
            "Frames of these sizes from offsets (u64) in a mapping to addresses (u64), on all threads. Returns a job "
            "number.");
    bind_completions(copier, "Jobs that have ended: (job, one byte a frame, 1 = it was copied and is its key's).");
}

}  // namespace

void bind_frame_stream(nb::module_& m) {
    bind_copier(m);
    m.def(
        "send_ranges",
        [](int socket, const Packed<std::byte, "head">& head, const Addresses& addresses, const Sizes& sizes,
           double total_seconds, double idle_seconds) {
            return lmcache::send_ranges(socket, head, addresses, sizes, {total_seconds, idle_seconds});
        },
        nb::arg("socket"), nb::arg("head"), nb::arg("addresses"), nb::arg("sizes"), nb::arg("total_seconds"),
        nb::arg("idle_seconds"), ReleaseGil(),
        "Sends `head`, then memory ranges (u64 each) one behind the other (no GIL). 0, or an errno: ETIMEDOUT at a "
        "limit. shutdown(2) of the socket ends it. The caller answers for the ranges.");
    m.def(
        "exchange",
        [](int socket, const Packed<std::byte, "request">& request, std::size_t header_bytes, std::size_t most_bytes,
           double total_seconds, double idle_seconds) {
            lmcache::Answer answer =
                lmcache::exchange(socket, request, header_bytes, most_bytes, {total_seconds, idle_seconds});
            return std::pair(AsBytes{std::move(answer.message)}, answer.error);
        },
        nb::arg("socket"), nb::arg("request"), nb::arg("header_bytes"), nb::arg("most_bytes"), nb::arg("total_seconds"),
        nb::arg("idle_seconds"), ReleaseGil(),
        "Sends a request and receives the message that answers it (no GIL): `header_bytes`, whose last four are the "
        "u32 of what follows, and that; of one with more than `most_bytes` the header alone. (the message, errno): "
        "ETIMEDOUT at a limit, of each of the steps, ECONNRESET when the other side has closed. shutdown(2) of the "
        "socket ends it.");
    m.def(
        "receive_frames",
        [](int socket, const Addresses& addresses, const Sizes& sizes, const Digests& namespace_digests,
           const ChunkHashes& chunk_hashes, double total_seconds, double idle_seconds) {
            const auto received = lmcache::receive_frames(socket, {addresses, sizes, namespace_digests, chunk_hashes},
                                                          {total_seconds, idle_seconds});
            return std::pair(names_of(received.faults), received.error);
        },
        nb::arg("socket"), nb::arg("addresses"), nb::arg("sizes"), nb::arg("namespace_digests"),
        nb::arg("chunk_hashes"), nb::arg("total_seconds"), nb::arg("idle_seconds"), ReleaseGil(),
        "Receives frames of these sizes (u64) one behind the other to these addresses (u64) and verifies each as "
        "`verify_frames` does, in the same pass (no GIL). (why each frame that came whole is not its key's, errno): "
        "without an errno all came. shutdown(2) of the socket ends it.");
    m.def(
        "frame_sizes",
        [](std::uintptr_t address, std::size_t memory_bytes, const Packed<std::uint64_t, "slots">& slots) {
            const auto sizes = lmcache::frame_sizes(memory_at(address), memory_bytes, slots);
            std::uint64_t total = 0;
            for (const std::uint64_t size : sizes) total += size;
            return std::pair(AsBytes{sizes}, total);
        },
        nb::arg("address"), nb::arg("memory_bytes"), nb::arg("slots"), ReleaseGil(),
        "(u64 size of the frame in each slot (u64 offsets), 0 where there is none; their sum).");
}
