#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "buffers.h"
#include "lmcache/transfer_loop.h"

void bind_machine(nb::module_& m);
void bind_hashing(nb::module_& m);
void bind_frame(nb::module_& m);
void bind_paged_copy(nb::module_& m);
void bind_cuda(nb::module_& m);
void bind_l1(nb::module_& m);
void bind_l1_results(nb::module_& m);
void bind_change_log(nb::module_& m);
void bind_ledger(nb::module_& m);
void bind_fleet_directory(nb::module_& m);
void bind_file_io(nb::module_& m);
void bind_folder_scan(nb::module_& m);
void bind_mapped_copy(nb::module_& m);
void bind_raw_block(nb::module_& m);
void bind_raw_index(nb::module_& m);
void bind_resp(nb::module_& m);
void bind_serde(nb::module_& m);
void bind_seen_chunks(nb::module_& m);

using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

// An argument that is empty unless it is given.
inline nb::arg_v maybe_empty(const char* name) { return nb::arg(name).sig("b''") = nb::bytes("", 0); }

inline std::byte* memory_at(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

inline auto completion(std::uint64_t job, lmcache::IoResults&& results) {
    return std::tuple(job, AsNumbers{std::move(results.values)}, AsNumbers{std::move(results.errors)});
}
inline auto completion(std::uint64_t job, std::vector<std::uint8_t>&& results) {
    return std::tuple(job, AsBytes{std::move(results)});
}

// What a reader of completions needs: event_fd, drain and close of a class with a JobQueue.
template <typename Source>
void bind_completions(nb::class_<Source>& source, const char* drain_doc) {
    source.def("event_fd", &Source::event_fd)
        .def(
            "drain",
            [](Source& self) {
                auto completions = self.drain();
                std::vector<decltype(completion(0, std::move(completions.front().results)))> jobs;
                for (auto& [job, results] : completions) jobs.push_back(completion(job, std::move(results)));
                return jobs;
            },
            ReleaseGil(), drain_doc)
        .def("close", &Source::close, ReleaseGil(), "Waits for everything submitted. Idempotent.");
}
