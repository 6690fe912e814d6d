#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <tuple>
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
    nb::gil_scoped_release release;
    std::unique_ptr<lmcache::BlockMover> mover;
    if (cuda == nullptr) {
        mover = std::make_unique<lmcache::HostMover>();
    } else {
        mover = std::make_unique<lmcache::CudaMover>(std::move(cuda), threads);
    }
    new (copier) PagedCopier(arena_address, arena_bytes, threads, std::move(mover));
}

// What submit_store and submit_load have in common. `identity` is the template of the one, the digest of the other.
template <auto kSubmit, class... Fence>
PagedCopier::JobId submit(PagedCopier& copier, std::size_t group, nb::object slots, nb::object blocks,
                          nb::object hashes, const nb::bytes& identity, Fence... fence) {
    const PackedView<std::uint64_t> slot_view(slots, "slots");
    const PackedView<std::int64_t> block_view(blocks, "blocks");
    const PackedView<std::byte> hash_view(hashes, "hashes");
    const std::span<const std::byte> identity_bytes(reinterpret_cast<const std::byte*>(identity.data()),
                                                    identity.size());
    nb::gil_scoped_release release;
    return (copier.*kSubmit)(group, {slot_view.data(), slot_view.size()}, {block_view.data(), block_view.size()},
                             {hash_view.data(), hash_view.size()}, identity_bytes, std::move(fence)...);
}

}  // namespace

void bind_paged_copy(nb::module_& m) {
    nb::class_<PagedCopier>(m, "PagedCopier")
        .def("__init__", make, nb::arg("arena_address"), nb::arg("arena_bytes"), nb::arg("threads"),
             nb::arg("cuda") = nb::none())
        .def("add_group", add_group, nb::arg("segments"), nb::arg("blocks_per_chunk"), nb::arg("num_blocks"))
        .def("payload_bytes", &PagedCopier::payload_bytes, nb::arg("group"))
        .def("submit_store", submit<&PagedCopier::submit_store>, nb::arg("group"), nb::arg("slots"), nb::arg("blocks"),
             nb::arg("hashes"), nb::arg("template"))
        .def("submit_load", submit<&PagedCopier::submit_load, std::shared_ptr<lmcache::CudaFence>>, nb::arg("group"),
             nb::arg("slots"), nb::arg("blocks"), nb::arg("hashes"), nb::arg("namespace_digest"),
             nb::arg("fence") = nb::none())
        .def(
            "wait",
            [](PagedCopier& copier, PagedCopier::JobId job, double timeout_seconds) -> nb::object {
                std::optional<PagedCopier::Results> results;
                {
                    nb::gil_scoped_release release;
                    results = copier.wait(job, timeout_seconds);
                }
                return results ? nb::object(packed(*results)) : nb::none();
            },
            nb::arg("job"), nb::arg("timeout_seconds"))
        .def("close", &PagedCopier::close, nb::call_guard<nb::gil_scoped_release>());
}
