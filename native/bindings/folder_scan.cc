#include "lmcache/folder_scan.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"

void bind_folder_scan(nb::module_& m) {
    m.def(
        "scan_folders",
        [](const std::vector<std::string>& folders, unsigned threads) {
            lmcache::FolderScan scan;
            {
                nb::gil_scoped_release released;
                scan = lmcache::scan_folders(folders, threads);
            }
            return nb::make_tuple(packed(scan.hashes), packed(scan.used_ns), packed(scan.sizes), scan.temporary,
                                  scan.empty, scan.unreadable);
        },
        nb::arg("folders"), nb::arg("threads"));
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
