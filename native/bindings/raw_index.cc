#include "lmcache/raw_index.h"

#include <cstring>

#include "bindings.h"

namespace {

using lmcache::DeviceIO;
using lmcache::RawBatch;
using lmcache::RawIndex;
using lmcache::RawIndexOptions;
using lmcache::RawKeys;
using lmcache::Transfer;

using Digest = Packed<std::byte, "digest">;
using Spaces = Packed<std::uint32_t, "spaces">;
using Hashes = Packed<std::byte, "hashes">;
using Slots = Packed<std::uint32_t, "slots">;
using Errors = Packed<std::int32_t, "errors">;
using Results = Packed<std::int64_t, "results">;

RawKeys keys_of(const Spaces& spaces, const Hashes& hashes) {
    if (hashes.size() != 32 * spaces.size())
        throw std::invalid_argument("there must be a hash of 32 bytes for each of spaces");
    return {spaces, hashes.data()};
}

// The batch and its number in `io`, which is 0 when there is nothing to transfer.
template <typename Submit>
std::tuple<RawBatch, std::uint64_t> submitted(RawBatch&& batch, const Submit& submit) {
    std::uint64_t number = 0;
    if (!batch.transfers.empty()) {
        nb::gil_scoped_release released;
        number = submit(std::vector<Transfer>(batch.transfers));
    }
    return {std::move(batch), number};
}

// A method that gives slots or pages, as a function that gives a memoryview.
template <auto kMethod>
auto numbers() {
    return [](RawIndex& self) { return AsNumbers{std::vector<std::uint32_t>((self.*kMethod)())}; };
}

void bind_recovery(nb::class_<RawIndex>& index) {
    index
        .def(
            "__init__",
            [](RawIndex* self, std::uint32_t slots, std::uint64_t slot_bytes, std::uint64_t frame_limit_bytes,
               std::uint64_t first_slot_offset, std::size_t page_bytes, std::uint64_t first_generation,
               const Packed<std::byte, "device">& device) {
                RawIndexOptions options{
                    slots, slot_bytes, frame_limit_bytes, first_slot_offset, page_bytes, first_generation, {}};
                const std::span<const std::byte, sizeof options.device> id = device;
                std::memcpy(options.device, id.data(), sizeof options.device);
                new (self) RawIndex(options);
            },
            nb::arg("slots"), nb::arg("slot_bytes"), nb::arg("frame_limit_bytes"), nb::arg("first_slot_offset"),
            nb::arg("page_bytes"), nb::arg("first_generation"), nb::arg("device"))
        .def(
            "intern",
            [](RawIndex& self, const Digest& digest, std::uint32_t number) { return self.intern(digest, number); },
            nb::arg("digest"), nb::arg("number"), "A new namespace. `number`: its page on the device, or 2**32 - 1.")
        .def("take_unused_spaces", numbers<&RawIndex::take_unused_spaces>(),
             "u32: namespaces that have neither objects nor transfers under way. Their ids are given to others from "
             "now on.")
        .def("set_number", &RawIndex::set_number, nb::arg("space"), nb::arg("number"))
        .def(
            "load_pages",
            [](RawIndex& self, std::uint32_t first, const Packed<std::byte, "pages">& pages, const Spaces& spaces,
               bool forget) { self.load_pages(first, pages, spaces, forget); },
            nb::arg("first"), nb::arg("pages"), nb::arg("spaces"), nb::arg("forget"), ReleaseGil(),
            "Recovery: pages of the table from `first` on. `spaces`: u32 by namespace number, 2**32 - 1 for unknown "
            "ones. `forget`: nothing counts but generations.")
        .def("slots_to_scan", numbers<&RawIndex::slots_to_scan>(), "Slots of which the pages did not tell.")
        .def(
            "add",
            [](RawIndex& self, std::uint32_t slot, std::uint32_t space, const Packed<std::byte, "hash">& hash,
               std::uint64_t size_bytes,
               std::uint64_t generation) { self.add(slot, space, hash, size_bytes, generation); },
            nb::arg("slot"), nb::arg("space"), nb::arg("hash"), nb::arg("size_bytes"), nb::arg("generation"),
            "What the header of such a slot tells.")
        .def("finish_recovery", &RawIndex::finish_recovery, nb::arg("gap"), ReleaseGil(),
             "Then the index is ready. `gap`: generations that may have been used without a trace.")
        .def("youngest_first", numbers<&RawIndex::youngest_first>(), ReleaseGil(),
             "Slots of all objects, last used first.");
}

void bind_batches(nb::class_<RawIndex>& index) {
    index
        .def(
            "begin_store",
            [](RawIndex& self, DeviceIO& io, const Spaces& spaces, const Hashes& hashes, const Ranges& buffers,
               std::uintptr_t heads) {
                RawBatch batch;
                {
                    nb::gil_scoped_release released;
                    batch =
                        self.begin_store(keys_of(spaces, hashes), buffers.addresses, buffers.sizes, memory_at(heads));
                }
                return submitted(std::move(batch), [&](auto all) { return io.submit_write(std::move(all)); });
            },
            nb::arg("io"), nb::arg("spaces"), nb::arg("hashes"), nb::arg("buffers"), nb::arg("heads"),
            "Submits what is not there yet; (batch, its number in `io` or 0). `heads`: address of 4096 bytes a key.")
        .def(
            "end_store",
            [](RawIndex& self, RawBatch& batch, const Errors& errors, std::uint64_t now) {
                AsNumbers pages{self.end_store(batch, errors, now)};
                return std::tuple(AsBytes{batch.codes}, std::move(pages));
            },
            nb::arg("batch"), nb::arg("errors"), nb::arg("now"),
            "(one code a key: 0 failed, 1 stored, 2 already there, 3 too large, 4 full; pages to write, one after the "
            "other). `now`: microseconds since 1970.")
        .def(
            "begin_load",
            [](RawIndex& self, DeviceIO& io, const Spaces& spaces, const Hashes& hashes, const Ranges& buffers) {
                return submitted(self.begin_load(keys_of(spaces, hashes), buffers.addresses, buffers.sizes),
                                 [&](auto all) { return io.submit_read(std::move(all)); });
            },
            nb::arg("io"), nb::arg("spaces"), nb::arg("hashes"), nb::arg("buffers"),
            "Submits what is there. Its slots are not written before end_load, which must follow.")
        .def(
            "end_load",
            [](RawIndex& self, RawBatch& batch, const Results& results, const Errors& errors, std::uint64_t now) {
                AsNumbers corrupt{self.end_load(batch, results, errors, now)};
                return std::tuple(AsBytes{batch.codes}, std::move(corrupt));
            },
            nb::arg("batch"), nb::arg("results"), nb::arg("errors"), nb::arg("now"), ReleaseGil(),
            "(one code a key: 0 missing, 1 loaded, 2 corrupt, 3 failed; positions of keys to remove as corrupt).")
        .def(
            "begin_erase",
            [](RawIndex& self, DeviceIO& io, std::uint32_t first, std::size_t count, std::uintptr_t zeros) {
                auto slots = self.take_stale(first, count);
                std::vector<Transfer> all;
                for (const std::uint32_t slot : slots)
                    all.push_back({self.offset_of(slot), zeros, lmcache::kFrameHeaderBytes, 0});
                const std::uint64_t number = slots.empty() ? 0 : io.submit_write(std::move(all));
                return std::tuple(AsNumbers{std::move(slots)}, number);
            },
            nb::arg("io"), nb::arg("first"), nb::arg("count"), nb::arg("zeros"),
            "Submits 4096 zeros to free slots, from `first` on, that may have the header of a previous object; (slots, "
            "number).")
        .def(
            "end_erase",
            [](RawIndex& self, const Slots& slots, const Errors& errors) { self.end_erase(slots, errors); },
            nb::arg("slots"), nb::arg("errors"))
        .def(
            "read_headers",
            [](const RawIndex& self, DeviceIO& io, const Slots& slots, std::uintptr_t memory) {
                std::vector<Transfer> all;
                for (std::size_t i = 0; i < slots.size(); ++i)
                    all.push_back({self.offset_of(slots[i]), memory + i * lmcache::kFrameHeaderBytes,
                                   lmcache::kFrameHeaderBytes, 0});
                return io.submit_read(std::move(all));
            },
            nb::arg("io"), nb::arg("slots"), nb::arg("memory"), "Submits reading 4096 bytes of each slot.");
}

void bind_contents(nb::class_<RawIndex>& index) {
    index
        .def(
            "misplaced",
            [](const RawIndex& self, const Slots& slots, const Packed<std::uint64_t, "generations">& generations,
               std::uintptr_t headers, const Results& results, const Errors& errors) {
                return AsNumbers{self.misplaced(slots, generations, memory_at(headers), results, errors)};
            },
            nb::arg("slots"), nb::arg("generations"), nb::arg("headers"), nb::arg("results"), nb::arg("errors"),
            "Slots that still hold the object of that generation and whose header (read_headers) is another's.")
        .def(
            "sizes_of",
            [](const RawIndex& self, const Spaces& spaces, const Hashes& hashes) {
                return AsNumbers{self.sizes_of(keys_of(spaces, hashes))};
            },
            nb::arg("spaces"), nb::arg("hashes"), "u64 bytes a key, 0 where nothing is there.")
        .def(
            "describe",
            [](const RawIndex& self, const Slots& slots) {
                AsNumbers<std::vector<std::uint32_t>> spaces;
                AsBytes<std::vector<std::uint8_t>> hashes;
                AsNumbers<std::vector<std::uint64_t>> sizes;
                for (std::size_t i = 0; i < slots.size(); ++i) {
                    const auto& entry = self.entry(slots[i]);
                    spaces.elements.push_back(self.space_of(slots[i]));
                    hashes.elements.insert(hashes.elements.end(), std::begin(entry.hash), std::end(entry.hash));
                    sizes.elements.push_back(entry.units * RawIndex::kUnitBytes);
                }
                return std::tuple(std::move(spaces), std::move(hashes), std::move(sizes));
            },
            nb::arg("slots"), "(u32 spaces, hashes, u64 bytes) of slots; 0 bytes where nothing is.")
        .def(
            "claimed_from",
            [](const RawIndex& self, std::uint32_t first, std::size_t count) {
                AsNumbers slots{self.claimed_from(first, count)};
                AsNumbers<std::vector<std::uint64_t>> generations;
                for (const std::uint32_t slot : slots.elements)
                    generations.elements.push_back(self.entry(slot).generation);
                return std::tuple(std::move(slots), std::move(generations));
            },
            nb::arg("first"), nb::arg("count"),
            "(slots, u64 generations) of at most that many objects from slot `first` on.")
        .def(
            "remove",
            [](RawIndex& self, const Spaces& spaces, const Hashes& hashes) {
                return AsNumbers{self.remove(keys_of(spaces, hashes))};
            },
            nb::arg("spaces"), nb::arg("hashes"),
            "The slots, each of which goes to release_slots() when its page is written.")
        .def("remove_all", numbers<&RawIndex::remove_all>(),
             "The same for everything. What is being stored is not there either; `next_generation` is the first that "
             "is.")
        .def(
            "release_slots", [](RawIndex& self, const Slots& slots) { self.release_slots(slots); }, nb::arg("slots"),
            "The table on the device no longer claims them.");
}

void bind_pages(nb::class_<RawIndex>& index) {
    index
        .def(
            "pages_of", [](const RawIndex& self, const Slots& slots) { return AsNumbers{self.pages_of(slots)}; },
            nb::arg("slots"))
        .def("dirty_pages", numbers<&RawIndex::dirty_pages>(),
             "Pages that are newer here than on the device, and may wait.")
        .def(
            "page_image",
            [](RawIndex& self, std::uint32_t page) {
                AsBytes<std::vector<std::byte>> image{std::vector<std::byte>(self.page_bytes())};
                self.page_image(page, image.elements.data());
                return image;
            },
            nb::arg("page"), "A page of the table as it is to be written now.")
        .def("check", &RawIndex::check, "Asserts every invariant; RuntimeError names the one broken. O(slots).");
}

}  // namespace

void bind_raw_index(nb::module_& m) {
    nb::class_<RawBatch>(m, "RawBatch", "A batch of a RawIndex that is under way; keep it until its end.");
    nb::class_<RawIndex> index(m, "RawIndex",
                               "What is where on a raw device (docs/formats/raw_block.md), batch by batch. Keys are "
                               "`spaces` (u32, by intern(); what no intern() gave is unknown) and `hashes` (32 bytes "
                               "each); slots and pages are u32. Not thread-safe.");
    index.def_prop_ro("objects", &RawIndex::objects)
        .def_prop_ro("object_bytes", &RawIndex::object_bytes)
        .def_prop_ro("free_slots", &RawIndex::free_slots)
        .def_prop_ro("next_generation", &RawIndex::next_generation);
    bind_recovery(index);
    bind_batches(index);
    bind_contents(index);
    bind_pages(index);
}
