// What the calls of L1Core and recover_frames return: read-only values with named attributes.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <set>
#include <stdexcept>

#include "bindings.h"
#include "lmcache/l1_core.h"
#include "lmcache/recovered_frames.h"

namespace {

using namespace lmcache;

template <typename Array>
nb::bytes bytes_of(const Array& array) {
    return nb::bytes(array.data(), array.size());
}

void bind_claims(nb::module_& m) {
    nb::class_<Acquired>(m, "Acquired")
        .def_ro("lease", &Acquired::lease)
        .def_ro("chunks", &Acquired::chunks)
        .def_prop_ro("slots", [](const Acquired& self) { return packed(self.slots); });
    nb::class_<Reserved>(m, "Reserved")
        .def_ro("reservation", &Reserved::reservation)
        .def_ro("chunks_without_room", &Reserved::chunks_without_room)
        .def_prop_ro("slots", [](const Reserved& self) { return packed(self.slots); });
    nb::class_<CommitRecord>(m, "CommitRecord")
        .def_ro("namespace", &CommitRecord::name_space)
        .def_ro("chunk", &CommitRecord::chunk)
        .def_ro("slot", &CommitRecord::slot)
        .def_ro("size_bytes", &CommitRecord::size_bytes);
    nb::class_<Committed>(m, "Committed")
        .def_ro("lease", &Committed::lease)
        .def_prop_ro("objects", [](const Committed& self) { return self.records.size(); })
        .def_prop_ro("records", [](const Committed& self) { return self.records; });
    nb::class_<EndedClaims>(m, "EndedClaims")
        .def_ro("leases", &EndedClaims::leases)
        .def_ro("reservations", &EndedClaims::reservations);
}

void bind_contents(nb::module_& m) {
    nb::class_<Removed>(m, "Removed").def_ro("objects", &Removed::objects).def_ro("size_bytes", &Removed::size_bytes);
    nb::class_<Overuse>(m, "Overuse").def_ro("salt", &Overuse::salt).def_ro("limit_bytes", &Overuse::limit_bytes);
    nb::class_<Ages>(m, "Ages")
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
    nb::class_<ObjectPage>(m, "ObjectPage")
        .def_ro("next_start", &ObjectPage::next_start)
        .def("__len__", [](const ObjectPage& self) { return self.positions.size(); })
        .def("__getitem__", [](const ObjectPage& self, std::size_t index) {
            if (index >= self.positions.size()) throw nb::index_error();
            return ListedObject{bytes_of(self.namespaces[self.positions[index]]),
                                nb::bytes(&self.hashes[index * kChunkHashBytes], kChunkHashBytes),
                                self.sizes_bytes[index]};
        });
}

void bind_recovered(nb::module_& m) {
    nb::class_<RecoveredNamespace>(m, "RecoveredNamespace")
        .def_prop_ro("digest", [](const RecoveredNamespace& self) { return bytes_of(self.digest); })
        .def_prop_ro("encoded", [](const RecoveredNamespace& self) { return bytes_of(self.encoded); });
    nb::class_<RecoveredFrames>(m, "RecoveredFrames")
        .def("__len__", [](const RecoveredFrames& self) { return self.frames.size(); })
        .def_ro("namespaces", &RecoveredFrames::namespaces)
        .def_prop_ro("owners", [](const RecoveredFrames& self) {
            std::set<Owner> owners;
            for (const UncommittedSlot& slot : self.slots) owners.insert(slot.owner);
            return std::vector<Owner>(owners.begin(), owners.end());
        });
    nb::class_<QuarantinedOwner>(m, "QuarantinedOwner")
        .def_ro("owner", &QuarantinedOwner::owner)
        .def_ro("reservation", &QuarantinedOwner::reservation);
    nb::class_<Recovered>(m, "Recovered")
        .def_ro("objects", &Recovered::objects)
        .def_ro("size_bytes", &Recovered::size_bytes)
        .def_ro("refused", &Recovered::refused)
        .def_ro("quarantined", &Recovered::quarantined)
        .def_ro("quarantined_bytes", &Recovered::quarantined_bytes);
}

}  // namespace

void bind_l1_results(nb::module_& m) {
    bind_claims(m);
    bind_contents(m);
    bind_recovered(m);
}
