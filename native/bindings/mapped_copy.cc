#include <vector>

#include "bindings.h"
#include "lmcache/dax_directory.h"
#include "lmcache/mapped_copier.h"

using lmcache::MappedCopier;

namespace {

std::span<const std::byte, lmcache::kDaxIdBytes> device_id(const PackedView<std::byte>& id) {
    if (id.size() != lmcache::kDaxIdBytes) throw std::invalid_argument("device must be 16 bytes");
    return std::span<const std::byte, lmcache::kDaxIdBytes>(id.data(), lmcache::kDaxIdBytes);
}

}  // namespace

void bind_mapped_copy(nb::module_& m) {
    m.def(
        "make_dax_entries",
        [](nb::handle device, nb::handle slots, nb::handle names, nb::handle frame_bytes, std::uint64_t used_ns) {
            const PackedView<std::byte> id(device, "device"), all_names(names, "names");
            const PackedView<std::uint64_t> places(slots, "slots"), sizes(frame_bytes, "frame_bytes");
            return packed(lmcache::make_dax_entries(device_id(id), {places.data(), places.size()},
                                                    {all_names.data(), all_names.size()}, {sizes.data(), sizes.size()},
                                                    used_ns));
        },
        nb::arg("device"), nb::arg("slots"), nb::arg("names"), nb::arg("frame_bytes"), nb::arg("used_ns"));
    using lmcache::DaxDirectory;
    nb::class_<DaxDirectory>(m, "DaxDirectory")
        .def_prop_ro("slots", [](const DaxDirectory& directory) { return typed(directory.slots); })
        .def_prop_ro("names", [](const DaxDirectory& directory) { return packed(directory.names); })
        .def_prop_ro("frame_bytes", [](const DaxDirectory& directory) { return typed(directory.frame_bytes); })
        .def_prop_ro("free", [](const DaxDirectory& directory) { return typed(directory.free); });
    m.def(
        "read_dax_directory",
        [](nb::handle device, nb::handle entries, std::uint64_t stride) {
            const PackedView<std::byte> id(device, "device"), bytes(entries, "entries");
            nb::gil_scoped_release released;
            return lmcache::read_dax_directory(device_id(id), {bytes.data(), bytes.size()}, stride);
        },
        nb::arg("device"), nb::arg("entries"), nb::arg("stride"));
    nb::class_<MappedCopier> copier(m, "MappedCopier");
    bind_completions(copier);
    copier
        .def(
            "__init__",
            [](MappedCopier* self, std::uintptr_t mapping_address, std::size_t mapping_bytes, unsigned threads,
               bool flush) {
                new (self) MappedCopier({reinterpret_cast<std::byte*>(mapping_address), mapping_bytes, threads, flush});
            },
            nb::arg("mapping_address"), nb::arg("mapping_bytes"), nb::arg("threads"), nb::arg("flush"))
        .def(
            "submit_read",
            [](MappedCopier& self, nb::handle destinations, nb::handle sources, nb::handle sizes) {
                auto to = numbers(destinations, "destinations");
                auto from = numbers(sources, "sources");
                auto bytes = numbers(sizes, "sizes");
                nb::gil_scoped_release released;
                return self.submit_read(std::move(to), std::move(from), std::move(bytes));
            },
            nb::arg("destinations"), nb::arg("sources"), nb::arg("sizes"))
        .def(
            "submit_write",
            [](MappedCopier& self, nb::handle destinations, nb::handle sources, nb::handle sizes,
               nb::handle record_places, nb::handle records, std::size_t record_bytes) {
                auto to = numbers(destinations, "destinations");
                auto from = numbers(sources, "sources");
                auto bytes = numbers(sizes, "sizes");
                auto places = numbers(record_places, "record_places");
                const PackedView<std::byte> record_view(records, "records");
                std::vector<std::byte> packed(record_view.data(), record_view.data() + record_view.size());
                nb::gil_scoped_release released;
                return self.submit_write(std::move(to), std::move(from), std::move(bytes), std::move(places),
                                         std::move(packed), record_bytes);
            },
            nb::arg("destinations"), nb::arg("sources"), nb::arg("sizes"), nb::arg("record_places"), nb::arg("records"),
            nb::arg("record_bytes"));
}
