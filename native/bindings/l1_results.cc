// What the calls of L1Core and recover_frames return: read-only values with named attributes.
#include <nanobind/stl/string.h>

#include <set>

#include "bindings.h"
#include "listing.h"
#include "lmcache/l1_core.h"
#include "lmcache/recovered_frames.h"

namespace {

using namespace lmcache;

void bind_claims(nb::module_& m) {
    nb::class_<Acquired>(m, "Acquired",
                         "`lease` is 0 when nothing was there. `slots`: u64 offsets in the arena, [namespace][chunk]; "
                         "made anew by each access.")
        .def_ro("lease", &Acquired::lease)
        .def_ro("chunks", &Acquired::chunks)
        .def_prop_ro("slots", as_bytes(&Acquired::slots));
    nb::class_<Reserved>(m, "Reserved", "`reservation` is 0 when no slot was handed out. `slots` as in Acquired.")
        .def_ro("reservation", &Reserved::reservation)
        .def_prop_ro("slots", as_bytes(&Reserved::slots))
        .def_ro("chunks_without_room", &Reserved::chunks_without_room);
    nb::class_<CommitRecord>(
        m, "CommitRecord",
        "An object made resident. `namespace` and `chunk` are indexes into those of the reservation.")
        .def_ro("namespace", &CommitRecord::name_space)
        .def_ro("chunk", &CommitRecord::chunk)
        .def_ro("slot", &CommitRecord::slot)
        .def_ro("size_bytes", &CommitRecord::size_bytes);
    nb::class_<Committed>(m, "Committed")
        .def_prop_ro("objects", [](const Committed& self) { return self.records.size(); })
        .def_ro("lease", &Committed::lease)
        .def_prop_ro(
            "records", [](const Committed& self) { return self.records; },
            "One for each of `objects`, in chunk order; made anew by each access.");
    nb::class_<EndedClaims>(m, "EndedClaims")
        .def_ro("leases", &EndedClaims::leases)
        .def_ro("reservations", &EndedClaims::reservations);
}

void bind_contents(nb::module_& m) {
    nb::class_<Removed>(m, "Removed").def_ro("objects", &Removed::objects).def_ro("size_bytes", &Removed::size_bytes);
    nb::class_<Overuse>(m, "Overuse").def_ro("salt", &Overuse::salt).def_ro("limit_bytes", &Overuse::limit_bytes);
    nb::class_<Ages>(m, "Ages", "In seconds: store to eviction, last use to eviction, between uses.")
        .def_ro("lifetimes", &Ages::lifetimes)
        .def_ro("idle_before_eviction", &Ages::idle_before_eviction)
        .def_ro("reuse_gaps", &Ages::reuse_gaps);
    struct ListedObject {
        nb::bytes namespace_digest, chunk_hash;
        std::uint64_t size_bytes;
    };
    nb::class_<ListedObject>(m, "ListedObject")
        .def_ro("namespace_digest", &ListedObject::namespace_digest)
        .def_ro("chunk_hash", &ListedObject::chunk_hash)
        .def_ro("size_bytes", &ListedObject::size_bytes);
    nb::class_<ObjectPage>(m, "ObjectPage",
                           "Objects in index order. `next_start`: where the next page starts, 0 after the last one.")
        .def_ro("next_start", &ObjectPage::next_start)
        .def("__len__", [](const ObjectPage& self) { return self.positions.size(); })
        .def_prop_ro(
            "namespaces",
            [](const ObjectPage& self) {
                std::vector<std::pair<nb::bytes, nb::bytes>> firsts(self.namespaces.size());
                std::vector<bool> found(self.namespaces.size());
                for (std::size_t i = 0; i < self.positions.size(); ++i) {
                    const std::uint32_t position = self.positions[i];
                    if (found[position]) continue;
                    found[position] = true;
                    const Digest& digest = self.namespaces[position];
                    firsts[position] = {nb::bytes(digest.data(), digest.size()),
                                        nb::bytes(&self.hashes[i * kChunkHashBytes], kChunkHashBytes)};
                }
                return firsts;
            },
            "The digest of each namespace of the page, and the hash of its first object.")
        .def_prop_ro("positions", as_bytes(&ObjectPage::positions),
                     "u32 each: where the object's namespace is in `namespaces`.")
        .def_prop_ro("hashes", as_bytes(&ObjectPage::hashes), "32 bytes each.")
        .def_prop_ro("sizes_bytes", as_bytes(&ObjectPage::sizes_bytes), "u64 each.")
        .def(
            "listing",
            [](const ObjectPage& self, const std::vector<ListingTexts>& texts) {
                return listing(self.positions, self.hashes, self.sizes_bytes, texts);
            },
            nb::arg("texts"), kListingDoc)
        .def("__iter__",
             [](const nb::handle_t<ObjectPage>& self) {
                 return nb::steal<nb::typed<nb::iterator, ListedObject>>(PySeqIter_New(self.ptr()));
             })
        .def(
            "__getitem__",
            [](const ObjectPage& self, std::size_t index) {
                if (index >= self.positions.size()) throw nb::index_error();
                const Digest& digest = self.namespaces[self.positions[index]];
                return ListedObject{nb::bytes(digest.data(), digest.size()),
                                    nb::bytes(&self.hashes[index * kChunkHashBytes], kChunkHashBytes),
                                    self.sizes_bytes[index]};
            },
            nb::arg("index"));
}

void bind_recovered(nb::module_& m) {
    nb::class_<RecoveredNamespace>(m, "RecoveredNamespace",
                                   "As in the headers. The caller checks that the digest is that of `encoded`.")
        .def_prop_ro("digest", as_bytes(&RecoveredNamespace::digest))
        .def_prop_ro("encoded", as_bytes(&RecoveredNamespace::encoded));
    nb::class_<RecoveredFrames>(
        m, "RecoveredFrames",
        "Frames whose header verifies, found by a slot table. len() counts them; payloads have not been read.")
        .def_ro("namespaces", &RecoveredFrames::namespaces)
        .def_prop_ro(
            "owners",
            [](const RecoveredFrames& self) {
                std::set<Owner> owners;
                for (const UncommittedSlot& slot : self.slots) owners.insert(slot.owner);
                return std::vector<Owner>(owners.begin(), owners.end());
            },
            "Who was writing into a slot that was not committed.")
        .def("__len__", [](const RecoveredFrames& self) { return self.frames.size(); });
    nb::class_<QuarantinedOwner>(m, "QuarantinedOwner",
                                 "An owner that may still write, and the quarantined reservation that holds its slots.")
        .def_ro("owner", &QuarantinedOwner::owner)
        .def_ro("reservation", &QuarantinedOwner::reservation);
    nb::class_<Recovered>(m, "Recovered")
        .def_ro("objects", &Recovered::objects)
        .def_ro("size_bytes", &Recovered::size_bytes)
        .def_ro("refused", &Recovered::refused,
                "Words of the table that describe no slot, and frames whose header or namespace is wrong.")
        .def_ro("quarantined", &Recovered::quarantined)
        .def_ro("quarantined_bytes", &Recovered::quarantined_bytes);
}

}  // namespace

void bind_l1_results(nb::module_& m) {
    bind_claims(m);
    bind_contents(m);
    bind_recovered(m);
}
