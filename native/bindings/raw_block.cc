#include <nanobind/stl/string.h>

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

using Offsets = Packed<std::uint64_t, "offsets">;
using Addresses = Packed<std::uint64_t, "addresses">;
using Sizes = Packed<std::uint64_t, "sizes">;
using Heads = Packed<std::uint64_t, "heads">;

std::vector<Transfer> transfers(const Offsets& offsets, const Addresses& addresses, const Sizes& sizes,
                                const Heads& heads) {
    const std::size_t count = offsets.size();
    if (addresses.size() != count || sizes.size() != count || (heads.size() != 0 && heads.size() != count))
        throw std::invalid_argument("offsets, addresses, sizes and heads must have the same length");
    std::vector<Transfer> result(count);
    for (std::size_t i = 0; i < count; ++i)
        result[i] = {offsets[i], addresses[i], sizes[i], heads.size() != 0 ? heads[i] : 0};
    return result;
}

void bind_device_io(nb::module_& m) {
    nb::class_<DeviceIO> io(
        m, "DeviceIO",
        "Ranges of one open file or block device, moved by threads (`queue_depth` 0) or by io_uring with at most "
        "`queue_depth` transfers under way. `fd` stays the caller's. OSError where io_uring is refused.");
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
            [](DeviceIO& self, const Offsets& offsets, const Addresses& addresses, const Sizes& sizes,
               const Heads& heads) { return self.submit_write(transfers(offsets, addresses, sizes, heads)); },
            nb::arg("offsets"), nb::arg("addresses"), nb::arg("sizes"), nb::arg("heads"), ReleaseGil(),
            "u64 each. `heads`: empty, or the address of 4096 bytes that take the place of the first 4096 (0: none).")
        .def(
            "submit_read",
            [](DeviceIO& self, const Offsets& offsets, const Addresses& addresses, const Sizes& sizes) {
                return self.submit_read(transfers(offsets, addresses, sizes, {}));
            },
            nb::arg("offsets"), nb::arg("addresses"), nb::arg("sizes"), ReleaseGil())
        .def("submit_sync", &DeviceIO::submit_sync, ReleaseGil(), "fdatasync.")
        .def("copied", &DeviceIO::copied, "Transfers that did not fit O_DIRECT and went through memory of their own.");
    bind_completions(io, "As FileIO.drain; values are bytes moved. A read ends early at the end of the file.");
}

}  // namespace

void bind_raw_block(nb::module_& m) {
    m.def("io_uring_refusal", &lmcache::io_uring_refusal,
          "0 where this process may use io_uring, else the errno that says why not.");
    bind_device_io(m);
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
            [](const SlotHeader& self) { return nb::bytes(self.frame.name_space, self.frame.namespace_bytes); },
            "Encoded.")
        .def_prop_ro(
            "chunk_hash",
            [](const SlotHeader& self) { return nb::bytes(self.frame.chunk_hash, sizeof self.frame.chunk_hash); })
        .def_prop_ro("payload_bytes", [](const SlotHeader& self) { return self.frame.payload_bytes; });
    m.def(
        "slot_header_parse",
        [](const Packed<std::byte, "header">& header) {
            if (header.size() < lmcache::kFrameHeaderBytes) throw std::invalid_argument("a slot header has 4096 bytes");
            SlotHeader parsed;
            std::memcpy(&parsed.frame, header.data(), sizeof parsed.frame);
            if (const SlotVerdict verdict = lmcache::slot_header_parse(parsed.frame, parsed.place);
                verdict.fault != lmcache::SlotFault::kNone)
                throw std::invalid_argument(std::string("not a slot header: wrong ") +
                                            lmcache::slot_fault_name(verdict));
            return parsed;
        },
        nb::arg("header"), "ValueError where these bytes are not the header of a slot.");
}
