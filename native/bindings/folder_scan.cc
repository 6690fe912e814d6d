#include "lmcache/folder_scan.h"

#include <nanobind/stl/string.h>

#include "bindings.h"

void bind_folder_scan(nb::module_& m) {
    using lmcache::FolderScan;
    nb::class_<FolderScan>(m, "FolderScan",
                           "Objects in columns of one length, in no order: 32-byte `hashes`, `used_ns` (i64, last use "
                           "since 1970), `sizes` (u64 bytes). `temporary`: paths that end in \".tmp\". `empty`: "
                           "folders with nothing in them. `unreadable`: (folder, errno). Each access copies.")
        .def_prop_ro("hashes", as_bytes(&FolderScan::hashes))
        .def_prop_ro("used_ns", as_bytes(&FolderScan::used_ns))
        .def_prop_ro("sizes", as_bytes(&FolderScan::sizes))
        .def_ro("temporary", &FolderScan::temporary)
        .def_ro("empty", &FolderScan::empty)
        .def_ro("unreadable", &FolderScan::unreadable);
    m.def("scan_folders", &lmcache::scan_folders, nb::arg("folders"), nb::arg("threads"), ReleaseGil(),
          "What is in each of these folders of a file adapter (docs/formats/files.md). A folder that is gone is left "
          "out.");
    m.def(
        "list_folders", &lmcache::list_folders, nb::arg("folders"), nb::arg("threads"), ReleaseGil(),
        "The same by the names of files alone: without `used_ns` and `sizes`, and what is named like an object counts "
        "as one.");
    m.def(
        "youngest_first",
        [](const Packed<std::int64_t, "used_ns">& used_ns) {
            return AsBytes{lmcache::youngest_first(used_ns.data(), used_ns.size())};
        },
        nb::arg("used_ns"), ReleaseGil(), "i64 times to u32 positions, the latest time first.");
}
