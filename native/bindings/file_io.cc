#include "lmcache/file_io.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"

namespace {

using lmcache::FileIO;
using lmcache::FileIOOptions;

}  // namespace

void bind_file_io(nb::module_& m) {
    nb::class_<FileIO> io(m, "FileIO");
    bind_completions(io);
    io.def(
          "__init__",
          [](FileIO* self, unsigned threads, bool use_odirect, std::size_t block_bytes, std::size_t read_ahead_bytes,
             unsigned queue_depth) {
              new (self) FileIO(FileIOOptions{threads, use_odirect, block_bytes, read_ahead_bytes, queue_depth});
          },
          nb::arg("threads"), nb::arg("use_odirect"), nb::arg("block_bytes"), nb::arg("read_ahead_bytes") = 0,
          nb::arg("queue_depth") = 0)
        .def(
            "submit_write",
            [](FileIO& self, std::vector<std::string> paths, std::vector<std::string> temporary_paths,
               nb::handle addresses, nb::handle sizes) {
                auto from = numbers(addresses, "addresses");
                auto bytes = numbers(sizes, "sizes");
                nb::gil_scoped_release released;
                return self.submit_write(std::move(paths), std::move(temporary_paths), std::move(from),
                                         std::move(bytes));
            },
            nb::arg("paths"), nb::arg("temporary_paths"), nb::arg("addresses"), nb::arg("sizes"))
        .def(
            "submit_read",
            [](FileIO& self, std::vector<std::string> paths, nb::handle addresses, nb::handle capacities) {
                auto to = numbers(addresses, "addresses");
                auto bytes = numbers(capacities, "capacities");
                nb::gil_scoped_release released;
                return self.submit_read(std::move(paths), std::move(to), std::move(bytes));
            },
            nb::arg("paths"), nb::arg("addresses"), nb::arg("capacities"))
        .def(
            "submit_read_frames",
            [](FileIO& self, const std::string& base, const nb::list& buffers, nb::handle frame_names) {
                Ranges ranges(buffers);
                const PackedView<std::byte> names(frame_names, "frame_names");
                std::vector<std::byte> frames(names.data(), names.data() + names.size());
                nb::gil_scoped_release released;
                return self.submit_read_frames(base, std::move(ranges.addresses), std::move(ranges.sizes),
                                               std::move(frames));
            },
            nb::arg("base"), nb::arg("buffers"), nb::arg("frame_names"))
        .def("submit_stat", &FileIO::submit_stat, nb::arg("paths"), nb::call_guard<nb::gil_scoped_release>())
        .def("submit_unlink", &FileIO::submit_unlink, nb::arg("paths"), nb::call_guard<nb::gil_scoped_release>())
        .def("submit_remove_empty", &FileIO::submit_remove_empty, nb::arg("folders"),
             nb::call_guard<nb::gil_scoped_release>())
        .def("buffered_fallbacks", &FileIO::buffered_fallbacks);
}
