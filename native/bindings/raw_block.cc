#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bindings.h"
#include "lmcache/device_io.h"
#include "lmcache/io_uring.h"
#include "lmcache/slot_header.h"

namespace {

using lmcache::DeviceIO;
using lmcache::DeviceIOOptions;
using lmcache::SlotPlace;
using lmcache::SlotVerdict;
using lmcache::Transfer;

using Words = PackedView<std::uint64_t>;

std::vector<Transfer> transfers(nb::handle offsets, nb::handle addresses, nb::handle sizes, nb::handle heads) {
    const Words at(offsets, "offsets"), memory(addresses, "addresses"), bytes(sizes, "sizes"), head(heads, "heads");
    const std::size_t count = at.size();
    if (memory.size() != count || bytes.size() != count || (head.size() != 0 && head.size() != count))
        throw std::invalid_argument("offsets, addresses, sizes and heads must have the same length");
    std::vector<Transfer> result(count);
    for (std::size_t i = 0; i < count; ++i)
        result[i] = {at.data()[i], memory.data()[i], bytes.data()[i], head.size() != 0 ? head.data()[i] : 0};
    return result;
}

}  // namespace

void bind_raw_block(nb::module_& m) {
    m.def("io_uring_refusal", &lmcache::io_uring_refusal);
    nb::class_<DeviceIO> io(m, "DeviceIO");
    bind_completions(io);
    io.def(
          "__init__",
          [](DeviceIO* self, int fd, unsigned threads, unsigned queue_depth, std::size_t align_bytes,
             bool copy_always) {
              new (self) DeviceIO(DeviceIOOptions{fd, threads, queue_depth, align_bytes, copy_always});
          },
          nb::arg("fd"), nb::arg("threads"), nb::arg("queue_depth"), nb::arg("align_bytes"),
          nb::arg("copy_always") = false)
        .def(
            "submit_write",
            [](DeviceIO& self, nb::handle offsets, nb::handle addresses, nb::handle sizes, nb::handle heads) {
                auto all = transfers(offsets, addresses, sizes, heads);
                nb::gil_scoped_release released;
                return self.submit_write(std::move(all));
            },
            nb::arg("offsets"), nb::arg("addresses"), nb::arg("sizes"), nb::arg("heads"))
        .def(
            "submit_read",
            [](DeviceIO& self, nb::handle offsets, nb::handle addresses, nb::handle sizes) {
                auto all = transfers(offsets, addresses, sizes, nb::bytes("", 0));
                nb::gil_scoped_release released;
                return self.submit_read(std::move(all));
            },
            nb::arg("offsets"), nb::arg("addresses"), nb::arg("sizes"))
        .def("submit_sync", &DeviceIO::submit_sync, nb::call_guard<nb::gil_scoped_release>())
        .def("copied", &DeviceIO::copied);
    struct SlotHeader {
        SlotPlace place;
        lmcache::FrameHeader frame;
    };
    nb::class_<SlotHeader>(m, "SlotHeader")
        .def_prop_ro("device",
                     [](const SlotHeader& self) { return nb::bytes(self.place.device, sizeof self.place.device); })
        .def_prop_ro("slot", [](const SlotHeader& self) { return self.place.slot; })
        .def_prop_ro("generation", [](const SlotHeader& self) { return self.place.generation; })
        .def_prop_ro(
            "namespace",
            [](const SlotHeader& self) { return nb::bytes(self.frame.name_space, self.frame.namespace_bytes); })
        .def_prop_ro(
            "chunk_hash",
            [](const SlotHeader& self) { return nb::bytes(self.frame.chunk_hash, sizeof self.frame.chunk_hash); })
        .def_prop_ro("payload_bytes", [](const SlotHeader& self) { return self.frame.payload_bytes; });
    m.def(
        "slot_header_parse",
        [](nb::handle header) {
            const PackedView<std::byte> view(header, "header");
            if (view.size() < lmcache::kFrameHeaderBytes) throw std::invalid_argument("a slot header has 4096 bytes");
            SlotHeader parsed;
            std::memcpy(&parsed.frame, view.data(), sizeof parsed.frame);
            if (const SlotVerdict verdict = lmcache::slot_header_parse(parsed.frame, parsed.place);
                verdict.fault != lmcache::SlotFault::kNone)
                throw std::invalid_argument(std::string("not a slot header: wrong ") +
                                            lmcache::slot_fault_name(verdict));
            return parsed;
        },
        nb::arg("header"));
}
