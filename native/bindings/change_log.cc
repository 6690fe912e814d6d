#include "lmcache/change_log.h"

#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"

namespace {

using lmcache::ChangedChunks;
using lmcache::ChangePage;
using lmcache::ObjectStates;

using StatesAsBytes = std::tuple<AsBytes<std::vector<std::uint8_t>>, AsBytes<std::vector<std::uint8_t>>,
                                 AsBytes<std::vector<std::uint64_t>>>;

std::vector<StatesAsBytes> as_bytes_each(std::vector<ObjectStates> states) {
    std::vector<StatesAsBytes> all;
    all.reserve(states.size());
    for (ObjectStates& of : states)
        all.emplace_back(AsBytes{std::move(of.gone)}, AsBytes{std::move(of.there)}, AsBytes{std::move(of.sizes_bytes)});
    return all;
}

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
            "last_states", [](const ChangePage& self) { return as_bytes_each(lmcache::last_states(self)); },
            ReleaseGil(),
            "For each namespace what comes of it: 32 bytes of each object that has gone, the same of those that are "
            "there, and u64 of the sizes of these. Of an object that changes several times the last state counts.")
        .def(
            "chunks",
            [](const ChangePage& self, const Packed<lmcache::Digest, "namespaces">& namespaces, std::size_t width) {
                ChangedChunks changed = lmcache::changed_chunks(self, namespaces, width);
                return std::pair(AsBytes{std::move(changed.sets)}, AsBytes{std::move(changed.hashes)});
            },
            nb::arg("namespaces"), nb::arg("width"), ReleaseGil(),
            "The chunks that change in these namespaces (packed digests, distinct, in sets of `width`), each once: u32 "
            "of its set, and 32 bytes of its hash.");
    m.def(
        "objects_by_namespace",
        [](const Packed<std::uint32_t, "positions">& positions, const Packed<std::uint8_t, "hashes">& hashes,
           const Packed<std::uint64_t, "sizes_bytes">& sizes_bytes, std::size_t namespaces) {
            ChangePage page{.namespaces = std::vector<lmcache::Digest>(namespaces),
                            .positions = positions,
                            .hashes = hashes,
                            .sizes_bytes = sizes_bytes,
                            .added = std::vector<std::uint8_t>(positions.size(), 1)};
            if (page.hashes.size() != page.positions.size() * lmcache::kChunkHashBytes ||
                page.sizes_bytes.size() != page.positions.size())
                throw std::invalid_argument("there must be 32 bytes of hash and a size for each position");
            for (const std::uint32_t position : page.positions)
                if (position >= namespaces) throw std::invalid_argument("a position is out of range");
            return as_bytes_each(lmcache::last_states(page));
        },
        nb::arg("positions"), nb::arg("hashes"), nb::arg("sizes_bytes"), nb::arg("namespaces"), ReleaseGil(),
        "The objects of a listing as `ChangePage.last_states` gives them.");
}
