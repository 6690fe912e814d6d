#include "lmcache/raw_index.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "lmcache/frame.h"

using namespace lmcache;

namespace {

constexpr std::uint64_t kSlotBytes = 8192;
constexpr std::uint32_t kSlots = 200;  // three pages of the table
constexpr std::size_t kPage = 4096;

using Hash = std::array<std::byte, kChunkHashBytes>;

RawIndexOptions options(std::uint64_t first_generation = 1) {
    RawIndexOptions result{kSlots, kSlotBytes, kSlotBytes, 65536, kPage, first_generation, {}};
    result.device[3] = 7;
    return result;
}

Hash hash_of(int number) {
    Hash hash{};
    std::memcpy(hash.data(), &number, sizeof number);
    hash[9] = std::byte{1};
    return hash;
}

std::array<std::byte, kDigestBytes> digest_of(int number) {
    std::array<std::byte, kDigestBytes> digest{};
    digest[0] = static_cast<std::byte>(number + 1);
    return digest;
}

// Keys of one namespace, their frames, and room for slot headers.
struct Keys {
    Keys(std::uint32_t space, int digest, int first, int count)
        : spaces(static_cast<std::size_t>(count), space), frames(spaces.size() * kSlotBytes), heads(frames.size()) {
        const std::array<std::byte, 4> name_space{};
        const FrameHeader header =
            frame_template(name_space, digest_of(digest), kSlotBytes - kFrameHeaderBytes, "", {});
        for (std::size_t i = 0; i < spaces.size(); ++i) {
            const Hash hash = hash_of(first + static_cast<int>(i));
            hashes.insert(hashes.end(), hash.begin(), hash.end());
            std::byte* const frame = frames.data() + i * kSlotBytes;
            frame_seal(frame, header, hash);
            addresses.push_back(reinterpret_cast<std::uint64_t>(frame));
            sizes.push_back(kSlotBytes);
        }
    }
    RawKeys get() const { return {spaces, hashes.data()}; }

    std::vector<std::uint32_t> spaces;
    std::vector<std::byte> hashes, frames, heads;
    std::vector<std::uint64_t> addresses, sizes;
};

// Slots in memory: what DeviceIO would do.
struct Device {
    std::vector<std::byte> slots = std::vector<std::byte>(kSlots * kSlotBytes);

    std::byte* at(const Transfer& transfer) { return slots.data() + (transfer.offset - options().first_slot_offset); }
    void write(const RawBatch& batch) {
        for (const Transfer& transfer : batch.transfers) {
            std::memcpy(at(transfer), reinterpret_cast<const void*>(transfer.address), transfer.size);
            std::memcpy(at(transfer), reinterpret_cast<const void*>(transfer.head), kFrameHeaderBytes);
        }
    }
    void read(const RawBatch& batch) {
        for (const Transfer& transfer : batch.transfers)
            std::memcpy(reinterpret_cast<void*>(transfer.address), at(transfer), transfer.size);
    }
};

std::vector<std::uint8_t> store(RawIndex& index, Device& device, Keys& keys,
                                std::vector<std::uint32_t>* pages = nullptr) {
    RawBatch batch = index.begin_store(keys.get(), keys.addresses, keys.sizes, keys.heads.data());
    device.write(batch);
    auto dirty = index.end_store(batch, std::vector<std::int32_t>(batch.transfers.size()), 1000);
    if (pages != nullptr) *pages = std::move(dirty);
    return batch.codes;
}

std::vector<std::uint8_t> load(RawIndex& index, Device& device, Keys& keys) {
    RawBatch batch = index.begin_load(keys.get(), keys.addresses, keys.sizes);
    device.read(batch);
    const std::vector<std::int64_t> moved(batch.transfers.size(), kSlotBytes);
    index.end_load(batch, moved, std::vector<std::int32_t>(moved.size()), 2000);
    return batch.codes;
}

std::vector<std::uint8_t> codes(std::size_t count, StoreCode code) {
    return std::vector<std::uint8_t>(count, static_cast<std::uint8_t>(code));
}
std::vector<std::uint8_t> codes(std::size_t count, LoadCode code) {
    return std::vector<std::uint8_t>(count, static_cast<std::uint8_t>(code));
}

std::vector<std::byte> pages_of(RawIndex& index) {
    std::vector<std::byte> pages(3 * kPage);
    for (std::uint32_t page = 0; page < 3; ++page) index.page_image(page, pages.data() + page * kPage);
    return pages;
}

TEST_CASE(numbers) {
    BitSet set(200);
    CHECK(set.take_lowest() == BitSet::kNone && set.lowest() == BitSet::kNone);
    for (const std::uint32_t number : {130U, 5U, 199U, 64U, 5U}) set.insert(number);
    CHECK(set.size() == 4 && set.contains(64) && !set.contains(65));
    CHECK(set.lowest(6) == 64 && set.lowest(65) == 130 && set.lowest(131) == 199 && set.lowest(200) == BitSet::kNone);
    CHECK(set.take_lowest() == 5 && set.take_lowest() == 64);
    set.insert(1);
    set.erase(130);
    CHECK(set.take_lowest() == 1 && set.take_lowest() == 199 && set.take_lowest() == BitSet::kNone);
}

TEST_CASE(round_trip) {
    RawIndex index(options());
    Device device;
    const std::uint32_t space = index.intern(digest_of(0), 0);
    index.finish_recovery(0);
    Keys some(space, 0, 0, 100), same(space, 0, 90, 20);
    std::vector<std::uint32_t> pages;
    CHECK(store(index, device, some, &pages) == codes(100, StoreCode::kStored));
    CHECK((pages == std::vector<std::uint32_t>{0, 1}));
    auto expected = codes(20, StoreCode::kStored);
    std::fill_n(expected.begin(), 10, static_cast<std::uint8_t>(StoreCode::kAlreadyThere));
    CHECK(store(index, device, same) == expected);
    const auto frames = some.frames;
    std::fill(some.frames.begin(), some.frames.end(), std::byte{0});
    CHECK(load(index, device, some) == codes(100, LoadCode::kLoaded) && some.frames == frames);
    CHECK(index.objects() == 110 && index.object_bytes() == 110 * kSlotBytes && index.free_slots() == kSlots - 110);
    Keys unknown(space, 0, 1000, 3), nowhere(RawIndex::kUnnamed, 0, 0, 3);
    CHECK(load(index, device, unknown) == codes(3, LoadCode::kMissing));
    CHECK(load(index, device, nowhere) == codes(3, LoadCode::kMissing));
    CHECK((index.sizes_of(same.get()) == std::vector<std::uint64_t>(20, kSlotBytes)));
    index.check();
}

TEST_CASE(full_and_faults) {
    RawIndex index(options());
    Device device;
    const std::uint32_t space = index.intern(digest_of(0), 0);
    index.finish_recovery(0);
    Keys many(space, 0, 0, 205);
    many.sizes[3] = kSlotBytes + 4096;
    many.frames[4 * kSlotBytes + 100] ^= std::byte{1};  // not the frame that its header promises
    const auto first = store(index, device, many);
    CHECK(first[3] == static_cast<std::uint8_t>(StoreCode::kTooLarge));
    CHECK(first[4] == static_cast<std::uint8_t>(StoreCode::kFailed));
    CHECK(std::count(first.begin(), first.end(), static_cast<std::uint8_t>(StoreCode::kStored)) == 199);
    CHECK(first[204] == static_cast<std::uint8_t>(StoreCode::kFull) && index.free_slots() == 1);
    index.check();
    Keys one(space, 0, 500, 1);
    RawBatch batch = index.begin_store(one.get(), one.addresses, one.sizes, one.heads.data());
    CHECK(batch.transfers.size() == 1 && index.free_slots() == 0);
    CHECK(index.end_store(batch, std::vector<std::int32_t>{EIO}, 0).empty());
    CHECK(batch.codes == codes(1, StoreCode::kFailed) && index.free_slots() == 1);
    batch = index.begin_store(one.get(), one.addresses, one.sizes, one.heads.data());
    index.end_store(batch, std::vector<std::int32_t>{ENOSPC}, 0);
    CHECK(batch.codes == codes(1, StoreCode::kFull));
    index.check();
}

TEST_CASE(removed_while_read) {
    RawIndex index(options());
    Device device;
    const std::uint32_t space = index.intern(digest_of(0), 0);
    index.finish_recovery(0);
    Keys some(space, 0, 0, 4);
    store(index, device, some);
    RawBatch reading = index.begin_load(some.get(), some.addresses, some.sizes);
    const auto gone = index.remove(some.get());
    CHECK(gone.size() == 4 && index.free_slots() == kSlots - 4);
    index.release_slots(gone);
    CHECK(index.free_slots() == kSlots - 4 && index.take_stale(0, 10).empty());
    device.read(reading);
    CHECK(index.end_load(reading, std::vector<std::int64_t>(4, kSlotBytes), std::vector<std::int32_t>(4), 0).empty());
    CHECK(reading.codes == codes(4, LoadCode::kLoaded) && index.free_slots() == kSlots);
    const auto stale = index.take_stale(1, 2);
    CHECK((stale == std::vector<std::uint32_t>{1, 2}) && index.free_slots() == kSlots - 2);
    index.end_erase(stale, std::vector<std::int32_t>{0, EIO});
    CHECK(index.free_slots() == kSlots && (index.take_stale(0, 9) == std::vector<std::uint32_t>{0, 3}));
    CHECK((index.dirty_pages() == std::vector<std::uint32_t>{0}));
}

TEST_CASE(removed_while_written) {
    RawIndex index(options());
    Device device;
    const std::uint32_t space = index.intern(digest_of(0), 0);
    index.finish_recovery(0);
    Keys some(space, 0, 0, 2), others(space, 0, 10, 2);
    store(index, device, others);
    RawBatch first = index.begin_store(some.get(), some.addresses, some.sizes, some.heads.data());
    RawBatch second = index.begin_store(some.get(), some.addresses, some.sizes, some.heads.data());
    const std::vector<std::int32_t> well(2);
    index.end_store(second, well, 0);
    index.end_store(first, well, 0);
    CHECK(second.codes == codes(2, StoreCode::kStored) && first.codes == codes(2, StoreCode::kAlreadyThere));
    first = index.begin_store(others.get(), others.addresses, others.sizes, others.heads.data());
    CHECK(first.codes == codes(2, StoreCode::kAlreadyThere));
    Keys late(space, 0, 20, 2);
    first = index.begin_store(late.get(), late.addresses, late.sizes, late.heads.data());
    const auto gone = index.remove_all();
    CHECK(gone.size() == 4 && index.objects() == 0);
    index.end_store(first, well, 0);
    CHECK(first.codes == codes(2, StoreCode::kFailed) && index.objects() == 0);
    index.release_slots(gone);
    CHECK(index.free_slots() == kSlots);
    index.check();
}

TEST_CASE(recovery) {
    RawIndex index(options());
    Device device;
    const std::uint32_t space = index.intern(digest_of(0), 0);
    index.finish_recovery(0);
    Keys some(space, 0, 0, 150), few(space, 0, 40, 3);
    store(index, device, some);
    index.release_slots(index.remove(few.get()));
    auto pages = pages_of(index);
    const std::vector<std::uint32_t> by_number{0};
    {
        RawIndex next(options());
        CHECK(next.intern(digest_of(0), 0) == 0);
        next.load_pages(0, pages, by_number, false);
        CHECK(next.slots_to_scan().empty());
        next.finish_recovery(100);
        next.check();
        CHECK(next.objects() == 147 && next.next_generation() == index.next_generation() + 100);
        const auto order = next.youngest_first();
        CHECK(order.size() == 147 && order.front() == 0 && order.back() == 149);
        CHECK((next.take_stale(0, 9) == std::vector<std::uint32_t>{40, 41, 42}));  // known to have headers, still
        CHECK(load(next, device, some)[10] == static_cast<std::uint8_t>(LoadCode::kLoaded));
    }
    {
        RawIndex next(options());
        next.intern(digest_of(0), 0);
        pages[kPage + 1000] ^= std::byte{1};
        next.load_pages(0, pages, by_number, false);
        CHECK(next.slots_to_scan().size() == 72 && next.slots_to_scan().front() == 72);
        const Hash twice = hash_of(5);  // an older place of the key in slot 5
        next.add(80, 0, twice, kSlotBytes, 0);
        next.add(81, 0, hash_of(900), kSlotBytes, 77);
        next.finish_recovery(0);
        next.check();
        CHECK(next.objects() == 72 - 3 + 6 + 1);
        CHECK((next.dirty_pages() == std::vector<std::uint32_t>{0, 1} ||
               next.dirty_pages() == std::vector<std::uint32_t>{1}));
    }
    {
        RawIndex next(options());
        next.intern(digest_of(0), 0);
        next.load_pages(0, pages_of(index), by_number, true);
        next.finish_recovery(0);
        CHECK(next.objects() == 0 && next.next_generation() == index.next_generation());
    }
    {
        RawIndex next(options(index.next_generation()));  // cleared: older generations do not count
        next.intern(digest_of(0), 0);
        next.load_pages(0, pages_of(index), by_number, false);
        next.finish_recovery(0);
        CHECK(next.objects() == 0 && next.take_stale(0, 9).empty());
        CHECK(refused([&] { next.load_pages(3, pages, by_number, false); }));
    }
}

TEST_CASE(misplaced_headers) {
    RawIndex index(options());
    Device device;
    const std::uint32_t space = index.intern(digest_of(0), 0);
    index.finish_recovery(0);
    Keys some(space, 0, 0, 4);
    store(index, device, some);
    std::vector<std::uint32_t> slots{0, 1, 2, 3};
    std::vector<std::uint64_t> generations;
    std::vector<std::byte> headers(4 * kPage);
    for (const std::uint32_t slot : slots) {
        generations.push_back(index.entry(slot).generation);
        std::memcpy(headers.data() + slot * kPage, device.slots.data() + slot * kSlotBytes, kPage);
    }
    std::vector<std::int64_t> moved(4, kPage);
    std::vector<std::int32_t> errors(4);
    CHECK(index.misplaced(slots, generations, headers.data(), moved, errors).empty());
    std::memcpy(headers.data() + kPage, headers.data(), kPage);
    errors[2] = EIO;
    moved[3] = 512;
    CHECK((index.misplaced(slots, generations, headers.data(), moved, errors) == std::vector<std::uint32_t>{1, 3}));
    generations[1] += 1;  // another object by now
    CHECK((index.misplaced(slots, generations, headers.data(), moved, errors) == std::vector<std::uint32_t>{3}));
}

// Beside a dictionary; the table on the device gives the same objects again.
TEST_CASE(like_a_dictionary) {
    std::mt19937 random(1);
    RawIndex index(options());
    Device device;
    const std::uint32_t space = index.intern(digest_of(0), 0);
    index.finish_recovery(0);
    std::map<int, bool> model;
    for (int step = 0; step < 2000; ++step) {
        const int first = static_cast<int>(random() % 300), count = 1 + static_cast<int>(random() % 8);
        Keys keys(space, 0, first, count);
        const auto act = random() % 10;
        if (act < 5) {
            const auto outcome = store(index, device, keys);
            for (int i = 0; i < count; ++i)
                if (outcome[static_cast<std::size_t>(i)] == static_cast<std::uint8_t>(StoreCode::kStored))
                    model[first + i] = true;
        } else if (act < 7) {
            index.release_slots(index.remove(keys.get()));
            for (int i = 0; i < count; ++i) model.erase(first + i);
        } else if (act < 8) {
            const auto slots = index.take_stale(0, 4);
            index.end_erase(slots, std::vector<std::int32_t>(slots.size()));
        } else {
            const auto outcome = load(index, device, keys);
            for (int i = 0; i < count; ++i)
                CHECK(outcome[static_cast<std::size_t>(i)] ==
                      static_cast<std::uint8_t>(model.contains(first + i) ? LoadCode::kLoaded : LoadCode::kMissing));
        }
        CHECK(index.objects() == model.size() && index.free_slots() == kSlots - model.size());
        if (step % 100 == 0) {
            index.check();
            RawIndex next(options());
            next.intern(digest_of(0), 0);
            next.load_pages(0, pages_of(index), std::vector<std::uint32_t>{0}, false);
            next.finish_recovery(0);
            next.check();
            CHECK(next.objects() == model.size());
        }
    }
}

}  // namespace
