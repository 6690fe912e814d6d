#include "lmcache/change_log.h"

#include "bindings.h"

namespace {

using lmcache::ChangedChunks;
using lmcache::ChangePage;

}  // namespace

void bind_change_log(nb::module_& m) {
    nb::class_<ChangePage>(m, "ChangePage",
                           "Changes of an index, oldest first, as columns of one length. `lost`: the cursor is too "
                           "old, or nobody watched meanwhile; list what is there, after taking `next_cursor`.")
        .def_ro("next_cursor", &ChangePage::next_cursor)
        .def_ro("lost", &ChangePage::lost)
        .def("__len__", [](const ChangePage& self) { return self.positions.size(); })
        .def_prop_ro(
            "namespaces",
            [](const ChangePage& self) {
                std::vector<nb::bytes> digests;
                digests.reserve(self.namespaces.size());
                for (const lmcache::Digest& digest : self.namespaces)
                    digests.emplace_back(digest.data(), digest.size());
                return digests;
            },
            "Their digests.")
        .def_prop_ro("positions", as_bytes(&ChangePage::positions),
                     "u32 each: where the object's namespace is in `namespaces`.")
        .def_prop_ro("hashes", as_bytes(&ChangePage::hashes), "32 bytes each.")
        .def_prop_ro("sizes_bytes", as_bytes(&ChangePage::sizes_bytes), "u64 each.")
        .def_prop_ro("added", as_bytes(&ChangePage::added), "A byte each: 1 it is there from now on, 0 it has gone.")
        .def(
            "chunks",
            [](const ChangePage& self, const Packed<lmcache::Digest, "namespaces">& namespaces, std::size_t width) {
                ChangedChunks changed = lmcache::changed_chunks(self, namespaces, width);
                return std::pair(AsBytes{std::move(changed.sets)}, AsBytes{std::move(changed.hashes)});
            },
            nb::arg("namespaces"), nb::arg("width"), ReleaseGil(),
            "The chunks that change in these namespaces (packed digests, distinct, in sets of `width`), each once: u32 "
            "of its set, and 32 bytes of its hash.");
}
