#include "bindings.h"
#include "lmcache/dax_directory.h"
#include "lmcache/mapped_copier.h"

using lmcache::DaxDirectory;
using lmcache::MappedCopier;

namespace {

using Device = Packed<std::byte, "device">;
using Destinations = Packed<std::uint64_t, "destinations">;
using Sources = Packed<std::uint64_t, "sources">;
using Sizes = Packed<std::uint64_t, "sizes">;

void bind_directory(nb::module_& m) {
    m.def(
        "make_dax_entries",
        [](const Device& device, const Packed<std::uint64_t, "slots">& slots, const Packed<std::byte, "names">& names,
           const Packed<std::uint64_t, "frame_bytes">& frame_bytes, std::uint64_t used_ns) {
            return AsBytes{lmcache::make_dax_entries(device, slots, names, frame_bytes, used_ns)};
        },
        nb::arg("device"), nb::arg("slots"), nb::arg("names"), nb::arg("frame_bytes"), nb::arg("used_ns"),
        "Directory entries (docs/formats/dax.md) of slots (u64) and what they hold: names of 64 bytes, u64 bytes of "
        "frames. `used_ns`: of the first; each one is a microsecond older than the one before.");
    nb::class_<DaxDirectory>(m, "DaxDirectory",
                             "Objects, last used first: u32 `slots`, `names` of 64 bytes, u64 `frame_bytes`. Beside "
                             "them u32 slots that are `free`. Each access copies.")
        .def_prop_ro("slots", as_numbers(&DaxDirectory::slots))
        .def_prop_ro("names", as_bytes(&DaxDirectory::names))
        .def_prop_ro("frame_bytes", as_numbers(&DaxDirectory::frame_bytes))
        .def_prop_ro("free", as_numbers(&DaxDirectory::free));
    m.def(
        "read_dax_directory",
        [](const Device& device, const Packed<std::byte, "entries">& entries, std::uint64_t stride) {
            return lmcache::read_dax_directory(device, entries, stride);
        },
        nb::arg("device"), nb::arg("entries"), nb::arg("stride"), ReleaseGil(),
        "All entries of the directory (docs/formats/dax.md). One that does not verify, or of a frame of more than "
        "`stride` bytes, is free.");
}

}  // namespace

void bind_mapped_copy(nb::module_& m) {
    bind_directory(m);
    nb::class_<MappedCopier> copier(
        m, "MappedCopier",
        "Streaming copies between memory and storage that is mapped into it, on native threads; completion is "
        "signalled by an eventfd. A page that the medium cannot give fails an element instead of raising SIGBUS. All "
        "lists are u64, one element each; what is in the mapping is named by its address.");
    copier
        .def(
            "__init__",
            [](MappedCopier* self, std::uintptr_t mapping_address, std::size_t mapping_bytes, unsigned threads,
               bool flush) { new (self) MappedCopier({memory_at(mapping_address), mapping_bytes, threads, flush}); },
            nb::arg("mapping_address"), nb::arg("mapping_bytes"), nb::arg("threads"), nb::arg("flush"),
            "`flush`: what was written has left the processor's caches before its record is written, and the record "
            "before the job is reported.")
        .def(
            "submit_read",
            [](MappedCopier& self, const Destinations& destinations, const Sources& sources, const Sizes& sizes) {
                return self.submit_read(destinations, sources, sizes);
            },
            nb::arg("destinations"), nb::arg("sources"), nb::arg("sizes"), ReleaseGil(),
            "Out of the mapping, elements on all threads. Returns a job number.")
        .def(
            "submit_write",
            [](MappedCopier& self, const Destinations& destinations, const Sources& sources, const Sizes& sizes,
               const Packed<std::uint64_t, "record_places">& record_places, const Packed<std::byte, "records">& records,
               std::size_t record_bytes) {
                return self.submit_write(destinations, sources, sizes, record_places, records, record_bytes);
            },
            nb::arg("destinations"), nb::arg("sources"), nb::arg("sizes"), nb::arg("record_places"), nb::arg("records"),
            nb::arg("record_bytes"), ReleaseGil(),
            "Into the mapping, in order, on one thread: each element, then its record. Size 0: the record alone. After "
            "an element that failed nothing more of the job is written.");
    bind_completions(copier, "Jobs that have ended: (job, one byte an element, 1 = copied).");
}
