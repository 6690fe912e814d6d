#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bindings.h"
#include "lmcache/device_io.h"
#include "lmcache/ring.h"
#include "lmcache/slot_header.h"

namespace {

using lmcache::DeviceIO;
using lmcache::DeviceIOOptions;
using lmcache::SlotPlace;
using lmcache::SlotVerdict;
using lmcache::Transfer;

using Words = PackedView<std::uint64_t>;

std::span<const std::byte, 32> at32(const PackedView<std::byte>& view, std::size_t index) {
    return std::span<const std::byte, 32>(view.data() + 32 * index, 32);
}

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

// What sealing and opening have in common: n frames, their keys and their places.
struct Slots {
    Slots(nb::handle frames_, nb::handle sizes_, nb::handle digests_, nb::handle hashes_, nb::handle device_,
          nb::handle slots_, nb::handle generations_)
        : frames(frames_, "frames"),
          sizes(sizes_, "sizes"),
          digests(digests_, "namespace_digests"),
          hashes(hashes_, "hashes"),
          device(device_, "device"),
          slots(slots_, "slots"),
          generations(generations_, "generations") {
        const std::size_t count = frames.size();
        if (sizes.size() != count || slots.size() != count || generations.size() != count ||
            digests.size() != 32 * count || hashes.size() != 32 * count)
            throw std::invalid_argument("frames, sizes, keys, slots and generations must have the same length");
        if (device.size() != lmcache::kDeviceIdBytes) throw std::invalid_argument("device must be 16 bytes");
    }

    SlotPlace place(std::size_t index) const {
        SlotPlace result{};
        std::memcpy(result.device, device.data(), sizeof result.device);
        result.slot = slots.data()[index];
        result.generation = generations.data()[index];
        return result;
    }

    template <typename Each>
    std::vector<std::string> each(Each each) const {
        std::vector<SlotVerdict> verdicts(frames.size());
        {
            nb::gil_scoped_release released;
            for (std::size_t i = 0; i < verdicts.size(); ++i)
                verdicts[i] = each(i, reinterpret_cast<std::byte*>(frames.data()[i]));
        }
        std::vector<std::string> faults(verdicts.size());
        for (std::size_t i = 0; i < verdicts.size(); ++i) faults[i] = lmcache::slot_fault_name(verdicts[i]);
        return faults;
    }

    Words frames, sizes;
    PackedView<std::byte> digests, hashes, device;
    Words slots, generations;
};

}  // namespace

void bind_raw_block(nb::module_& m) {
    m.def("io_uring_refusal", &lmcache::ring_refusal);
    nb::class_<DeviceIO>(m, "DeviceIO")
        .def(
            "__init__",
            [](DeviceIO* self, int fd, unsigned threads, unsigned queue_depth, std::size_t align_bytes,
               bool copy_always) {
                new (self) DeviceIO(DeviceIOOptions{fd, threads, queue_depth, align_bytes, copy_always});
            },
            nb::arg("fd"), nb::arg("threads"), nb::arg("queue_depth"), nb::arg("align_bytes"),
            nb::arg("copy_always") = false)
        .def("event_fd", &DeviceIO::event_fd)
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
        .def("drain",
             [](DeviceIO& self) {
                 std::vector<lmcache::FinishedBatch> finished;
                 {
                     nb::gil_scoped_release released;
                     finished = self.drain();
                 }
                 return packed_batches(finished);
             })
        .def("copied", &DeviceIO::copied)
        .def("close", &DeviceIO::close, nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "slot_headers_seal",
        [](std::uintptr_t heads, nb::handle frames, nb::handle sizes, nb::handle digests, nb::handle hashes,
           nb::handle device, nb::handle slots, nb::handle generations) {
            const Slots all(frames, sizes, digests, hashes, device, slots, generations);
            auto* const head = reinterpret_cast<std::byte*>(heads);
            return all.each([&](std::size_t i, const std::byte* frame) {
                return lmcache::slot_header_seal(frame, all.sizes.data()[i], head + i * lmcache::kFrameHeaderBytes,
                                                 all.place(i), at32(all.digests, i), at32(all.hashes, i));
            });
        },
        nb::arg("heads"), nb::arg("frames"), nb::arg("sizes"), nb::arg("namespace_digests"), nb::arg("hashes"),
        nb::arg("device"), nb::arg("slots"), nb::arg("generations"));
    m.def(
        "slot_header_parse",
        [](nb::handle header) {
            const PackedView<std::byte> view(header, "header");
            if (view.size() < lmcache::kFrameHeaderBytes) throw std::invalid_argument("a slot header has 4096 bytes");
            lmcache::FrameHeader copy;
            std::memcpy(&copy, view.data(), sizeof copy);
            SlotPlace place;
            if (const SlotVerdict verdict = lmcache::slot_header_parse(copy, place);
                verdict.fault != lmcache::SlotFault::kNone)
                throw std::invalid_argument(std::string("not a slot header: wrong ") +
                                            lmcache::slot_fault_name(verdict));
            return nb::make_tuple(nb::bytes(place.device, sizeof place.device), place.slot, place.generation,
                                  nb::bytes(copy.name_space, copy.namespace_bytes),
                                  nb::bytes(copy.chunk_hash, sizeof copy.chunk_hash), copy.payload_bytes);
        },
        nb::arg("header"));
}
