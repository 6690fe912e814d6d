#include <vector>

#include "bindings.h"
#include "lmcache/dax_directory.h"
#include "lmcache/mapped_copier.h"

namespace {

using lmcache::MappedCopier;

std::vector<std::uint64_t> numbers(nb::handle buffer, const char* name) {
    const PackedView<std::uint64_t> view(buffer, name);
    return {view.data(), view.data() + view.size()};
}

}  // namespace

void bind_mapped_copy(nb::module_& m) {
    m.def(
        "read_dax_directory",
        [](nb::handle device, std::uint64_t first, nb::handle entries, std::uint64_t stride) {
            const PackedView<std::byte> id(device, "device"), bytes(entries, "entries");
            if (id.size() != lmcache::kDaxIdBytes) throw std::invalid_argument("device must be 16 bytes");
            lmcache::DaxDirectory found;
            {
                nb::gil_scoped_release released;
                found = lmcache::read_dax_directory(
                    std::span<const std::byte, lmcache::kDaxIdBytes>(id.data(), lmcache::kDaxIdBytes), first,
                    {bytes.data(), bytes.size()}, stride);
            }
            return nb::make_tuple(packed(found.slots), packed(found.names), packed(found.frame_bytes),
                                  packed(found.free));
        },
        nb::arg("device"), nb::arg("first"), nb::arg("entries"), nb::arg("stride"));
    nb::class_<MappedCopier>(m, "MappedCopier")
        .def(
            "__init__",
            [](MappedCopier* self, std::uintptr_t mapping_address, std::size_t mapping_bytes, unsigned threads,
               bool flush) {
                new (self) MappedCopier({reinterpret_cast<std::byte*>(mapping_address), mapping_bytes, threads, flush});
            },
            nb::arg("mapping_address"), nb::arg("mapping_bytes"), nb::arg("threads"), nb::arg("flush"))
        .def("event_fd", &MappedCopier::event_fd)
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
            nb::arg("record_bytes"))
        .def("drain",
             [](MappedCopier& self) {
                 std::vector<std::pair<std::uint64_t, MappedCopier::Results>> finished;
                 {
                     nb::gil_scoped_release released;
                     finished = self.drain();
                 }
                 nb::list jobs;
                 for (const auto& [number, results] : finished)
                     jobs.append(nb::make_tuple(number, nb::bytes(results.data(), results.size())));
                 return jobs;
             })
        .def("close", &MappedCopier::close, nb::call_guard<nb::gil_scoped_release>());
}
