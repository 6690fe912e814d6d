#include "lmcache/folder_scan.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"

void bind_folder_scan(nb::module_& m) {
    using lmcache::FolderScan;
    nb::class_<FolderScan>(m, "FolderScan")
        .def_prop_ro("hashes", [](const FolderScan& self) { return packed(self.hashes); })
        .def_prop_ro("used_ns", [](const FolderScan& self) { return packed(self.used_ns); })
        .def_prop_ro("sizes", [](const FolderScan& self) { return packed(self.sizes); })
        .def_ro("temporary", &FolderScan::temporary)
        .def_ro("empty", &FolderScan::empty)
        .def_ro("unreadable", &FolderScan::unreadable);
    m.def(
        "scan_folders",
        [](const std::vector<std::string>& folders, unsigned threads) {
            return lmcache::scan_folders(folders, threads);
        },
        nb::arg("folders"), nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "youngest_first",
        [](nb::handle used_ns) {
            const PackedView<std::int64_t> times(used_ns, "used_ns");
            std::vector<std::uint32_t> order;
            {
                nb::gil_scoped_release released;
                order = lmcache::youngest_first(times.data(), times.size());
            }
            return packed(order);
        },
        nb::arg("used_ns"));
}
