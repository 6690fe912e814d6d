#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"
#include "lmcache/cuda_mover.h"
#include "lmcache/paged_copier.h"

namespace {

using lmcache::PagedCopier;
using DimTuple = std::pair<std::size_t, std::ptrdiff_t>;
using SegmentTuple = std::tuple<std::uintptr_t, std::ptrdiff_t, std::size_t, std::vector<DimTuple>>;

std::size_t add_group(PagedCopier& copier, const std::vector<SegmentTuple>& segments, std::size_t blocks_per_chunk,
                      std::size_t num_blocks) {
    std::vector<lmcache::Segment> converted;
    for (const auto& [base, block_stride, run_bytes, dims] : segments) {
        lmcache::Segment segment{base, block_stride, run_bytes, {}};
        for (const auto& [count, stride] : dims) segment.dims.push_back({count, stride});
        converted.push_back(std::move(segment));
    }
    return copier.add_group(std::move(converted), blocks_per_chunk, num_blocks);
}

void make(PagedCopier* copier, std::uintptr_t arena_address, std::size_t arena_bytes, std::size_t threads,
          std::shared_ptr<lmcache::CudaCopyMethods> cuda) {
    std::unique_ptr<lmcache::BlockMover> mover;
    if (cuda == nullptr) {
        mover = std::make_unique<lmcache::HostMover>();
    } else {
        mover = std::make_unique<lmcache::CudaMover>(std::move(cuda), threads);
    }
    new (copier) PagedCopier(arena_address, arena_bytes, threads, std::move(mover));
}

// What submit_store and submit_load have in common. `Identity` is the template of the one, the digest of the other.
template <auto kSubmit, class Identity, class... Fence>
PagedCopier::JobId submit(PagedCopier& copier, std::size_t group, const Packed<std::uint64_t, "slots">& slots,
                          const Packed<std::int64_t, "blocks">& blocks, const Packed<std::byte, "hashes">& hashes,
                          const Identity& identity, Fence... fence) {
    return (copier.*kSubmit)(group, slots, blocks, hashes, identity, std::move(fence)...);
}

using Template = Packed<std::byte, "template">;
using Digest = Packed<std::byte, "namespace_digest">;
using Fence = std::shared_ptr<lmcache::CudaFence>;

}  // namespace

void bind_paged_copy(nb::module_& m) {
    nb::class_<PagedCopier>(m, "PagedCopier",
                            "Copies between an engine's paged KV tensors and L1 slots on its own threads.\n\n"
                            "A group is described once. A `segment` is (base address, block stride in bytes, run "
                            "bytes, dims) where dims is a tuple of (count, stride in bytes) for the outer "
                            "non-contiguous dimensions of one block; a block's content is its runs in that order. "
                            "Payload order: segments in order, for each the blocks of the chunk in order.")
        .def("__init__", make, nb::arg("arena_address"), nb::arg("arena_bytes"), nb::arg("threads"),
             nb::arg("cuda") = nb::none(), ReleaseGil(),
             "`cuda`: the tensors lie in that device's memory. RuntimeError when it refuses streams.")
        .def("add_group", add_group, nb::arg("segments"), nb::arg("blocks_per_chunk"), nb::arg("num_blocks"),
             "Returns the group's number. `num_blocks` bounds block ids; an id outside is a ValueError at submit.")
        .def("payload_bytes", &PagedCopier::payload_bytes, nb::arg("group"))
        .def("submit_store", submit<&PagedCopier::submit_store, Template>, nb::arg("group"), nb::arg("slots"),
             nb::arg("blocks"), nb::arg("hashes"), nb::arg("template"), ReleaseGil(),
             "Gathers n chunks into n slots (u64 offsets in the arena) and seals their headers. `blocks` is i64, n x "
             "blocks_per_chunk, all >= 0, and computed. Slots that are NO_SLOT are skipped. Returns a job number.")
        .def("submit_load", submit<&PagedCopier::submit_load, Digest, Fence>, nb::arg("group"), nb::arg("slots"),
             nb::arg("blocks"), nb::arg("hashes"), nb::arg("namespace_digest"), nb::arg("fence") = nb::none(),
             ReleaseGil(),
             "Scatters n chunks from slots into blocks, verifying header and checksum on the way. A block id of -1 is "
             "verified but not written. A chunk whose frame does not verify is reported failed (its blocks hold "
             "garbage). No block is written before `fence`. Loads go before stores.")
        .def(
            "wait",
            [](PagedCopier& copier, PagedCopier::JobId job,
               double timeout_seconds) -> std::optional<AsBytes<PagedCopier::Results>> {
                if (auto results = copier.wait(job, timeout_seconds)) return AsBytes{std::move(*results)};
                return std::nullopt;
            },
            nb::arg("job"), nb::arg("timeout_seconds"), ReleaseGil(),
            "One byte a chunk, or None when the job still runs. 1 = copied and verified, 0 = not, 2 = a load that the "
            "device failed to write: nothing is known of its frame. A finished job is forgotten.")
        .def("close", &PagedCopier::close, ReleaseGil(),
             "Waits for running copies, then stops the threads. Idempotent.");
}
