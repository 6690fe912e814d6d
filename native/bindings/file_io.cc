#include "lmcache/file_io.h"

#include <nanobind/stl/string.h>

#include "bindings.h"

namespace {

using lmcache::FileIO;
using lmcache::FileIOOptions;
using Paths = std::vector<std::string>;
using Addresses = Packed<std::uint64_t, "addresses">;

}  // namespace

void bind_file_io(nb::module_& m) {
    nb::class_<FileIO> io(
        m, "FileIO",
        "Reads and writes whole files from and into memory on native threads; completion is signalled by an eventfd.");
    io.def(
          "__init__",
          [](FileIO* self, unsigned threads, bool use_odirect, std::size_t block_bytes, std::size_t read_ahead_bytes,
             unsigned queue_depth) {
              new (self) FileIO(FileIOOptions{threads, use_odirect, block_bytes, read_ahead_bytes, queue_depth});
          },
          nb::arg("threads"), nb::arg("use_odirect"), nb::arg("block_bytes"), nb::arg("read_ahead_bytes") = 0,
          nb::arg("queue_depth") = 0,
          "`queue_depth` above 0: transfers by io_uring, at most that many at once; OSError where it is refused.")
        .def(
            "submit_write",
            [](FileIO& self, Paths paths, Paths temporary_paths, const Addresses& addresses,
               const Packed<std::uint64_t, "sizes">& sizes) {
                return self.submit_write(std::move(paths), std::move(temporary_paths), addresses, sizes);
            },
            nb::arg("paths"), nb::arg("temporary_paths"), nb::arg("addresses"), nb::arg("sizes"), ReleaseGil(),
            "Each file: write to the temporary path, then rename. u64 addresses and sizes. Returns a job number. Files "
            "of a job are published in order, so that an interrupted job leaves a prefix. (docs/formats/files.md)")
        .def(
            "submit_read",
            [](FileIO& self, Paths paths, const Addresses& addresses,
               const Packed<std::uint64_t, "capacities">& capacities) {
                return self.submit_read(std::move(paths), addresses, capacities);
            },
            nb::arg("paths"), nb::arg("addresses"), nb::arg("capacities"), ReleaseGil())
        .def(
            "submit_read_frames",
            [](FileIO& self, const std::string& base, Ranges buffers,
               const Packed<std::byte, "frame_names">& frame_names) {
                return self.submit_read_frames(base, std::move(buffers.addresses), std::move(buffers.sizes),
                                               frame_names);
            },
            nb::arg("base"), nb::arg("buffers"), nb::arg("frame_names"), ReleaseGil(),
            "`frame_names`: 32 + 32 bytes a file below `base`, its namespace digest and chunk hash. What is not that "
            "frame, whole and with the right checksum, fails with EBADMSG; it is checked while it is read.")
        .def("submit_stat", &FileIO::submit_stat, nb::arg("paths"), ReleaseGil())
        .def("submit_unlink", &FileIO::submit_unlink, nb::arg("paths"), ReleaseGil())
        .def("submit_remove_empty", &FileIO::submit_remove_empty, nb::arg("folders"), ReleaseGil(),
             "Removes each folder that has nothing in it, and the one above it on the same condition.")
        .def("buffered_fallbacks", &FileIO::buffered_fallbacks,
             "Transfers that went through the page cache although O_DIRECT was asked for.");
    bind_completions(io,
                     "Jobs that have ended: (job, i64 value per file, i32 errno per file). Value: bytes moved, or file "
                     "size for stat, 0 for unlink and remove_empty, -1 with errno on failure.");
}
