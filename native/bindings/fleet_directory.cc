#include "lmcache/fleet_directory.h"

#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "listing.h"

namespace {

using lmcache::FleetDirectory;
using lmcache::FleetHolderStats;
using lmcache::FleetKeys;
using lmcache::FleetPage;
using lmcache::FleetStats;

using Positions = Packed<std::uint32_t, "positions">;
using Hashes = Packed<std::uint8_t, "hashes">;
using SizesBytes = Packed<std::uint64_t, "sizes_bytes">;
using Holders = Packed<std::uint32_t, "holders">;

std::string text_of(const nb::bytes& given) { return {given.c_str(), given.size()}; }

FleetKeys keys_of(const std::vector<nb::bytes>& scopes, const nb::bytes& variant, const Positions& positions,
                  const Hashes& hashes) {
    FleetKeys keys;
    for (const nb::bytes& scope : scopes) keys.scopes.push_back(text_of(scope));
    keys.variant = text_of(variant);
    keys.positions = positions;
    keys.hashes = hashes;
    if (keys.hashes.size() != keys.positions.size() * lmcache::kChunkHashBytes)
        throw std::invalid_argument("hashes must be 32 bytes for each position");
    if (keys.size() > lmcache::kMaxObjectsPerCall) throw std::invalid_argument("a call has too many keys");
    for (const std::uint32_t position : keys.positions) {
        if (position >= keys.scopes.size()) throw std::invalid_argument("a position is out of range");
    }
    return keys;
}

std::vector<AsBytes<std::string>> all_bytes(const std::vector<std::string>& texts) {
    std::vector<AsBytes<std::string>> all;
    for (const std::string& text : texts) all.push_back({text});
    return all;
}

void bind_values(nb::module_& m) {
    nb::class_<FleetPage>(m, "FleetPage", "Copies of objects: columns of one length.")
        .def("__len__", [](const FleetPage& self) { return self.positions.size(); })
        .def_prop_ro(
            "scopes", [](const FleetPage& self) { return all_bytes(self.scopes); }, "As they were encoded.")
        .def_prop_ro(
            "variants", [](const FleetPage& self) { return all_bytes(self.variants); }, "One a scope.")
        .def_prop_ro("positions", as_numbers(&FleetPage::positions), "Where a copy's scope is in `scopes`.")
        .def_prop_ro("keys", as_numbers(&FleetPage::keys), "Of a lookup: which of its keys a copy is of.")
        .def_prop_ro("hashes", as_bytes(&FleetPage::hashes), "Of a listing: 32 bytes each.")
        .def_prop_ro("holders", as_numbers(&FleetPage::holders))
        .def_prop_ro("sizes_bytes", as_numbers(&FleetPage::sizes_bytes))
        .def_prop_ro("access_counts", as_numbers(&FleetPage::access_counts), "Of the key, up to 65535.")
        .def_ro("next_start", &FleetPage::next_start, "Where the next page starts; 0 after the last one.");
    nb::class_<FleetHolderStats>(m, "FleetHolderStats")
        .def_ro("objects", &FleetHolderStats::objects)
        .def_ro("bytes", &FleetHolderStats::bytes);
    nb::class_<FleetStats>(m, "FleetStats")
        .def_ro("keys", &FleetStats::keys)
        .def_ro("records", &FleetStats::records, "Copies that are seen.")
        .def_ro("void_records", &FleetStats::void_records, "Of void holders, not swept yet.")
        .def_ro("scopes", &FleetStats::scopes)
        .def_ro("holders", &FleetStats::holders)
        .def_ro("memory_bytes", &FleetStats::memory_bytes);
}

void bind_changes(nb::class_<FleetDirectory>& directory) {
    directory.def("add_holder", &FleetDirectory::add_holder, nb::arg("place"),
                  "A life of a place, which has nothing. Beyond 65,535 of them that are not swept: ValueError.");
    directory.def("void_holder", &FleetDirectory::void_holder, nb::arg("holder"), ReleaseGil(),
                  "Its copies are seen no more, in one step. The number is another's once they have been swept.");
    directory.def("holder_stats", &FleetDirectory::holder_stats, nb::arg("holder"), ReleaseGil());
    directory.def(
        "store",
        [](FleetDirectory& self, std::uint32_t holder, const std::vector<nb::bytes>& scopes, const nb::bytes& variant,
           const Positions& positions, const Hashes& hashes, const SizesBytes& sizes_bytes) {
            const FleetKeys keys = keys_of(scopes, variant, positions, hashes);
            const nb::gil_scoped_release released;
            return self.store(holder, keys, sizes_bytes);
        },
        nb::arg("holder"), nb::arg("scopes"), nb::arg("variant"), nb::arg("positions"), nb::arg("hashes"),
        nb::arg("sizes_bytes"),
        "Copies that this holder has now: how many of them it has then, less than all only beyond a limit.");
    directory.def(
        "remove",
        [](FleetDirectory& self, std::uint32_t holder, const std::vector<nb::bytes>& scopes, const nb::bytes& variant,
           const Positions& positions, const Hashes& hashes) {
            const FleetKeys keys = keys_of(scopes, variant, positions, hashes);
            const nb::gil_scoped_release released;
            return self.remove(holder, keys);
        },
        nb::arg("holder"), nb::arg("scopes"), nb::arg("variant"), nb::arg("positions"), nb::arg("hashes"),
        "Copies that its place has no more: how many there were.");
    directory.def(
        "count_accesses",
        [](FleetDirectory& self, const std::vector<nb::bytes>& scopes, const nb::bytes& variant,
           const Positions& positions, const Hashes& hashes) {
            const FleetKeys keys = keys_of(scopes, variant, positions, hashes);
            const nb::gil_scoped_release released;
            return self.count_accesses(keys);
        },
        nb::arg("scopes"), nb::arg("variant"), nb::arg("positions"), nb::arg("hashes"),
        "Adds a use of each key: how many are known.");
    directory.def("sweep", &FleetDirectory::sweep, nb::arg("most_examined"), ReleaseGil(),
                  "Looks at that many records and frees those of void holders. Whether there are more of these.");
}

void bind_answers(nb::class_<FleetDirectory>& directory) {
    directory.def(
        "lookup",
        [](const FleetDirectory& self, const std::vector<nb::bytes>& scopes, const Positions& positions,
           const Hashes& hashes, std::size_t most_copies) {
            const FleetKeys keys = keys_of(scopes, nb::bytes("", 0), positions, hashes);
            const nb::gil_scoped_release released;
            return self.lookup(keys, most_copies);
        },
        nb::arg("scopes"), nb::arg("positions"), nb::arg("hashes"), nb::arg("most_copies"),
        "Copies of each key, in any variant, at most so many a key.");
    directory.def(
        "list",
        [](const FleetDirectory& self, std::uint32_t start, std::size_t most, std::size_t most_examined,
           const Holders& holders) {
            const nb::gil_scoped_release released;
            return self.list(start, most, most_examined, holders);
        },
        nb::arg("start"), nb::arg("most"), nb::arg("most_examined"), maybe_empty("holders"),
        "A page of copies from `start` on, which is 0 at first; of these holders alone, if any are given.");
    directory.def("scopes", &FleetDirectory::scopes, ReleaseGil(), "All of them, with their bytes as sizes.");
}

}  // namespace

void bind_fleet_directory(nb::module_& m) {
    m.def(
        "listing_text",
        [](const Hashes& hashes, const SizesBytes& sizes_bytes, const lmcache::ListingTexts& texts) {
            const nb::gil_scoped_release released;
            const std::vector<std::uint32_t> positions(sizes_bytes.size(), 0);
            return AsBytes<std::string>{lmcache::list_as_text(positions, hashes, sizes_bytes, {texts}).text};
        },
        nb::arg("hashes"), nb::arg("sizes_bytes"), nb::arg("texts"),
        "Objects as JSON with commas between them, where `texts` (before, between, after) surround hash and size.");
    bind_values(m);
    nb::class_<FleetDirectory> directory(
        m, "FleetDirectory",
        "Which servers have a copy of which object. A key is in the scope `scopes[positions[i]]`, and in a variant of "
        "it where it is told, and has 32 bytes of `hashes`. Thread-safe.");
    directory.def(nb::init<std::uint64_t>(), nb::arg("most_records"));
    bind_changes(directory);
    bind_answers(directory);
    directory.def("stats", &FleetDirectory::stats, ReleaseGil());
    directory.def("check", &FleetDirectory::check, ReleaseGil(),
                  "RuntimeError that names the broken invariant. O(records).");
}
