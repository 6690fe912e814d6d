#include "lmcache/raw_index.h"

#include <nanobind/stl/tuple.h>

#include <cstring>

#include "bindings.h"

namespace {

using lmcache::DeviceIO;
using lmcache::RawBatch;
using lmcache::RawIndex;
using lmcache::RawIndexOptions;
using lmcache::RawKeys;
using lmcache::Transfer;

template <typename T>
std::span<const T> span_of(const PackedView<T>& view) {
    return {view.data(), view.size()};
}

std::span<const std::byte, 32> only32(const PackedView<std::byte>& view) {
    if (view.size() != 32) throw std::invalid_argument("a digest or hash has 32 bytes");
    return std::span<const std::byte, 32>(view.data(), 32);
}

struct Keys {
    Keys(nb::handle spaces_, nb::handle hashes_) : spaces(spaces_, "spaces"), hashes(hashes_, "hashes") {
        if (hashes.size() != 32 * spaces.size())
            throw std::invalid_argument("there must be a hash of 32 bytes for each of spaces");
    }
    RawKeys get() const { return {span_of(spaces), hashes.data()}; }

    PackedView<std::uint32_t> spaces;
    PackedView<std::byte> hashes;
};

// The batch and its number in `io`, which is 0 when there is nothing to transfer.
template <typename Submit>
nb::tuple submitted(RawBatch&& batch, const Submit& submit) {
    std::uint64_t number = 0;
    if (!batch.transfers.empty()) {
        nb::gil_scoped_release released;
        number = submit(std::vector<Transfer>(batch.transfers));
    }
    return nb::make_tuple(std::move(batch), number);
}

void bind_recovery(nb::class_<RawIndex>& index) {
    index
        .def(
            "__init__",
            [](RawIndex* self, std::uint32_t slots, std::uint64_t slot_bytes, std::uint64_t frame_limit_bytes,
               std::uint64_t first_slot_offset, std::size_t page_bytes, std::uint64_t first_generation,
               nb::handle device) {
                const PackedView<std::byte> id(device, "device");
                RawIndexOptions options{
                    slots, slot_bytes, frame_limit_bytes, first_slot_offset, page_bytes, first_generation, {}};
                if (id.size() != sizeof options.device) throw std::invalid_argument("device must be 16 bytes");
                std::memcpy(options.device, id.data(), sizeof options.device);
                new (self) RawIndex(options);
            },
            nb::arg("slots"), nb::arg("slot_bytes"), nb::arg("frame_limit_bytes"), nb::arg("first_slot_offset"),
            nb::arg("page_bytes"), nb::arg("first_generation"), nb::arg("device"))
        .def(
            "intern",
            [](RawIndex& self, nb::handle digest, std::uint32_t number) {
                return self.intern(only32(PackedView<std::byte>(digest, "digest")), number);
            },
            nb::arg("digest"), nb::arg("number"))
        .def("take_unused_spaces", [](RawIndex& self) { return typed(self.take_unused_spaces()); })
        .def("set_number", &RawIndex::set_number, nb::arg("space"), nb::arg("number"))
        .def(
            "load_pages",
            [](RawIndex& self, std::uint32_t first, nb::handle pages, nb::handle spaces, bool forget) {
                const PackedView<std::byte> content(pages, "pages");
                const PackedView<std::uint32_t> ids(spaces, "spaces");
                nb::gil_scoped_release released;
                self.load_pages(first, span_of(content), span_of(ids), forget);
            },
            nb::arg("first"), nb::arg("pages"), nb::arg("spaces"), nb::arg("forget"))
        .def("slots_to_scan", [](const RawIndex& self) { return typed(self.slots_to_scan()); })
        .def(
            "add",
            [](RawIndex& self, std::uint32_t slot, std::uint32_t space, nb::handle hash, std::uint64_t size_bytes,
               std::uint64_t generation) {
                self.add(slot, space, only32(PackedView<std::byte>(hash, "hash")), size_bytes, generation);
            },
            nb::arg("slot"), nb::arg("space"), nb::arg("hash"), nb::arg("size_bytes"), nb::arg("generation"))
        .def("finish_recovery", &RawIndex::finish_recovery, nb::arg("gap"), nb::call_guard<nb::gil_scoped_release>())
        .def("youngest_first", [](const RawIndex& self) {
            std::vector<std::uint32_t> slots;
            {
                nb::gil_scoped_release released;
                slots = self.youngest_first();
            }
            return typed(slots);
        });
}

void bind_batches(nb::class_<RawIndex>& index) {
    index
        .def(
            "begin_store",
            [](RawIndex& self, DeviceIO& io, nb::handle spaces, nb::handle hashes, const nb::list& buffers,
               std::uintptr_t heads) {
                const Keys keys(spaces, hashes);
                const Ranges ranges(buffers);
                RawBatch batch;
                {
                    nb::gil_scoped_release released;
                    batch = self.begin_store(keys.get(), ranges.addresses, ranges.sizes,
                                             reinterpret_cast<std::byte*>(heads));
                }
                return submitted(std::move(batch), [&](auto all) { return io.submit_write(std::move(all)); });
            },
            nb::arg("io"), nb::arg("spaces"), nb::arg("hashes"), nb::arg("buffers"), nb::arg("heads"))
        .def(
            "end_store",
            [](RawIndex& self, RawBatch& batch, nb::handle errors, std::uint64_t now) {
                const PackedView<std::int32_t> faults(errors, "errors");
                const auto pages = self.end_store(batch, span_of(faults), now);
                return nb::make_tuple(packed(batch.codes), typed(pages));
            },
            nb::arg("batch"), nb::arg("errors"), nb::arg("now"))
        .def(
            "begin_load",
            [](RawIndex& self, DeviceIO& io, nb::handle spaces, nb::handle hashes, const nb::list& buffers) {
                const Keys keys(spaces, hashes);
                const Ranges ranges(buffers);
                return submitted(self.begin_load(keys.get(), ranges.addresses, ranges.sizes),
                                 [&](auto all) { return io.submit_read(std::move(all)); });
            },
            nb::arg("io"), nb::arg("spaces"), nb::arg("hashes"), nb::arg("buffers"))
        .def(
            "end_load",
            [](RawIndex& self, RawBatch& batch, nb::handle results, nb::handle errors, std::uint64_t now) {
                const PackedView<std::int64_t> moved(results, "results");
                const PackedView<std::int32_t> faults(errors, "errors");
                std::vector<std::uint32_t> corrupt;
                {
                    nb::gil_scoped_release released;
                    corrupt = self.end_load(batch, span_of(moved), span_of(faults), now);
                }
                return nb::make_tuple(packed(batch.codes), typed(corrupt));
            },
            nb::arg("batch"), nb::arg("results"), nb::arg("errors"), nb::arg("now"))
        .def(
            "begin_erase",
            [](RawIndex& self, DeviceIO& io, std::uint32_t first, std::size_t count, std::uintptr_t zeros) {
                const auto slots = self.take_stale(first, count);
                std::vector<Transfer> all;
                for (const std::uint32_t slot : slots)
                    all.push_back({self.offset_of(slot), zeros, lmcache::kFrameHeaderBytes, 0});
                return nb::make_tuple(typed(slots), slots.empty() ? 0 : io.submit_write(std::move(all)));
            },
            nb::arg("io"), nb::arg("first"), nb::arg("count"), nb::arg("zeros"))
        .def(
            "end_erase",
            [](RawIndex& self, nb::handle slots, nb::handle errors) {
                self.end_erase(span_of(PackedView<std::uint32_t>(slots, "slots")),
                               span_of(PackedView<std::int32_t>(errors, "errors")));
            },
            nb::arg("slots"), nb::arg("errors"))
        .def(
            "read_headers",
            [](const RawIndex& self, DeviceIO& io, nb::handle slots, std::uintptr_t memory) {
                const PackedView<std::uint32_t> wanted(slots, "slots");
                std::vector<Transfer> all;
                for (std::size_t i = 0; i < wanted.size(); ++i)
                    all.push_back({self.offset_of(wanted.data()[i]), memory + i * lmcache::kFrameHeaderBytes,
                                   lmcache::kFrameHeaderBytes, 0});
                return io.submit_read(std::move(all));
            },
            nb::arg("io"), nb::arg("slots"), nb::arg("memory"));
}

void bind_contents(nb::class_<RawIndex>& index) {
    index
        .def(
            "sizes_of",
            [](const RawIndex& self, nb::handle spaces, nb::handle hashes) {
                return typed(self.sizes_of(Keys(spaces, hashes).get()));
            },
            nb::arg("spaces"), nb::arg("hashes"))
        .def(
            "describe",
            [](const RawIndex& self, nb::handle slots) {
                const PackedView<std::uint32_t> wanted(slots, "slots");
                std::vector<std::uint32_t> spaces;
                std::vector<std::uint8_t> hashes(32 * wanted.size());
                std::vector<std::uint64_t> sizes;
                for (std::size_t i = 0; i < wanted.size(); ++i) {
                    const auto& entry = self.entry(wanted.data()[i]);
                    spaces.push_back(self.space_of(wanted.data()[i]));
                    std::memcpy(&hashes[32 * i], entry.hash, 32);
                    sizes.push_back(entry.units * RawIndex::kUnitBytes);
                }
                return nb::make_tuple(typed(spaces), packed(hashes), typed(sizes));
            },
            nb::arg("slots"))
        .def(
            "claimed_from",
            [](const RawIndex& self, std::uint32_t first, std::size_t count) {
                const auto slots = self.claimed_from(first, count);
                std::vector<std::uint64_t> generations;
                for (const std::uint32_t slot : slots) generations.push_back(self.entry(slot).generation);
                return nb::make_tuple(typed(slots), typed(generations));
            },
            nb::arg("first"), nb::arg("count"))
        .def(
            "misplaced",
            [](const RawIndex& self, nb::handle slots, nb::handle generations, std::uintptr_t headers,
               nb::handle results, nb::handle errors) {
                return typed(self.misplaced(span_of(PackedView<std::uint32_t>(slots, "slots")),
                                            span_of(PackedView<std::uint64_t>(generations, "generations")),
                                            reinterpret_cast<const std::byte*>(headers),
                                            span_of(PackedView<std::int64_t>(results, "results")),
                                            span_of(PackedView<std::int32_t>(errors, "errors"))));
            },
            nb::arg("slots"), nb::arg("generations"), nb::arg("headers"), nb::arg("results"), nb::arg("errors"))
        .def(
            "remove",
            [](RawIndex& self, nb::handle spaces, nb::handle hashes) {
                return typed(self.remove(Keys(spaces, hashes).get()));
            },
            nb::arg("spaces"), nb::arg("hashes"))
        .def("remove_all", [](RawIndex& self) { return typed(self.remove_all()); })
        .def(
            "release_slots",
            [](RawIndex& self, nb::handle slots) {
                self.release_slots(span_of(PackedView<std::uint32_t>(slots, "slots")));
            },
            nb::arg("slots"))
        .def(
            "pages_of",
            [](const RawIndex& self, nb::handle slots) {
                return typed(self.pages_of(span_of(PackedView<std::uint32_t>(slots, "slots"))));
            },
            nb::arg("slots"))
        .def("dirty_pages", [](const RawIndex& self) { return typed(self.dirty_pages()); })
        .def(
            "page_image",
            [](RawIndex& self, std::uint32_t page) {
                std::vector<std::byte> image(self.page_bytes());
                self.page_image(page, image.data());
                return packed(image);
            },
            nb::arg("page"))
        .def_prop_ro("objects", &RawIndex::objects)
        .def_prop_ro("object_bytes", &RawIndex::object_bytes)
        .def_prop_ro("free_slots", &RawIndex::free_slots)
        .def_prop_ro("next_generation", &RawIndex::next_generation)
        .def("check", &RawIndex::check);
}

}  // namespace

void bind_raw_index(nb::module_& m) {
    nb::class_<RawBatch>(m, "RawBatch");
    nb::class_<RawIndex> index(m, "RawIndex");
    bind_recovery(index);
    bind_batches(index);
    bind_contents(index);
}
