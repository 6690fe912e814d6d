#include "lmcache/paged_copier.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "copied_chunks.h"

using namespace lmcache;

namespace {

constexpr std::size_t kBlockBytes = 24576;

// Each layer has its blocks one after the other.
struct Fixture : CopierFixture<kBlockBytes> {
    explicit Fixture(std::size_t threads = 2) {
        copier = std::make_unique<PagedCopier>(address(arena), kArena, threads);
        group = copier->add_group(segments(kNumBlocks * kBlockBytes, kBlockBytes), kBlocksPerChunk, kNumBlocks);
        CHECK(copier->payload_bytes(group) == kPayload);
    }
};

constexpr double kPatience = Fixture::kPatience;
constexpr std::size_t kPayload = Fixture::kPayload;
constexpr std::size_t kFrame = Fixture::kFrame;

const PagedCopier::Results kBothGood{1, 1};

TEST_CASE(stored_chunks_come_back) {
    for (const std::size_t threads : {1, 3}) {
        Fixture f(threads);
        CHECK(f.store(0, kSlots) == PagedCopier::Results(kSlots, 1));
        for (std::size_t slot = 0; slot < kSlots; ++slot) CHECK(f.verdict(slot) == FrameFault::kNone);
        const std::vector<std::byte> original = f.kv;
        std::fill(f.kv.begin(), f.kv.end(), std::byte{0});
        CHECK(f.load(0, kSlots) == PagedCopier::Results(kSlots, 1));
        CHECK(f.kv == original);
    }
}

TEST_CASE(slots_may_be_missing) {
    Fixture f;
    auto slots = f.slots(0, 3);
    slots[1] = kNoSlot;
    auto job = f.copier->submit_store(f.group, slots, blocks_from(0, 3), hashes_from(0, 3), as_bytes(f.header));
    CHECK((*f.copier->wait(job, kPatience) == PagedCopier::Results{1, 0, 1}));
    CHECK(f.verdict(1) == FrameFault::kMagic);
    job = f.copier->submit_load(f.group, slots, blocks_from(0, 3), hashes_from(0, 3), kDigest);
    CHECK((*f.copier->wait(job, kPatience) == PagedCopier::Results{1, 0, 1}));
}

TEST_CASE(blocks_may_be_left_out) {
    Fixture f;
    CHECK(f.store(0, 2) == kBothGood);
    const std::vector<std::byte> original = f.kv;
    std::fill(f.kv.begin(), f.kv.end(), std::byte{0});
    std::vector<std::int64_t> blocks{kNoBlock, 1, kNoBlock, kNoBlock};
    const auto load = [&] {
        return *f.copier->wait(f.copier->submit_load(f.group, f.slots(0, 2), blocks, hashes_from(0, 2), kDigest),
                               kPatience);
    };
    CHECK(load() == kBothGood);
    std::vector<std::byte> expected(f.kv.size());
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
        const std::size_t at = (layer * kNumBlocks + 1) * kBlockBytes;
        std::memcpy(expected.data() + at, original.data() + at, kBlockBytes);
    }
    CHECK(f.kv == expected);
    // What is left out is verified all the same.
    f.arena[kFrame + kFrameHeaderBytes + 5] ^= std::byte{1};
    CHECK((load() == PagedCopier::Results{1, 0}));
}

TEST_CASE(a_wrong_frame_is_reported_and_the_others_are_not) {
    Fixture f;
    const auto failing = [&](std::size_t at) {
        CHECK(f.store(0, 3) == PagedCopier::Results(3, 1));
        f.arena[at] ^= std::byte{1};
        CHECK((f.load(0, 3) == PagedCopier::Results{1, 0, 1}));
    };
    failing(kFrame);                      // magic
    failing(kFrame + 300);                // header
    failing(kFrame + kFrameHeaderBytes);  // first byte of the payload
    failing(kFrame + kFrame - 1);         // its last
    CHECK(f.store(0, 3) == PagedCopier::Results(3, 1));
    const std::vector<std::byte> other(32, std::byte{9});
    auto job = f.copier->submit_load(f.group, f.slots(0, 3), blocks_from(0, 3), hashes_from(0, 3), other);
    CHECK((*f.copier->wait(job, kPatience) == PagedCopier::Results{0, 0, 0}));
    job = f.copier->submit_load(f.group, f.slots(0, 3), blocks_from(0, 3), hashes_from(1, 3), kDigest);
    CHECK((*f.copier->wait(job, kPatience) == PagedCopier::Results{0, 0, 0}));
}

TEST_CASE(a_frame_of_another_length_is_refused) {
    Fixture f;
    CHECK(f.store(0, 1) == PagedCopier::Results{1});
    const Segment half{reinterpret_cast<std::uintptr_t>(f.kv.data()), kBlockBytes, kBlockBytes, {}};
    const std::size_t smaller = f.copier->add_group({half}, kBlocksPerChunk, kNumBlocks);
    const auto job = f.copier->submit_load(smaller, f.slots(0, 1), blocks_from(0, 1), hashes_from(0, 1), kDigest);
    CHECK(*f.copier->wait(job, kPatience) == PagedCopier::Results{0});
}

// The slot becomes another object's while its payload is copied: here the copy itself writes over the header.
TEST_CASE(a_header_that_changes_during_the_copy_is_noticed) {
    Fixture f;
    const Segment inside{reinterpret_cast<std::uintptr_t>(f.arena), 4096, 4096, {}};
    const std::size_t group = f.copier->add_group({inside}, 1, 4);
    const FrameHeader header = frame_template({}, kDigest, 4096, "", {});
    const std::vector<std::uint64_t> slot{0};
    const auto hash = hashes_from(1, 1);
    const auto store = f.copier->submit_store(group, slot, std::vector<std::int64_t>{3}, hash, as_bytes(header));
    CHECK(*f.copier->wait(store, kPatience) == PagedCopier::Results{1});
    auto load = f.copier->submit_load(group, slot, std::vector<std::int64_t>{2}, hash, kDigest);
    CHECK(*f.copier->wait(load, kPatience) == PagedCopier::Results{1});
    load = f.copier->submit_load(group, slot, std::vector<std::int64_t>{0}, hash, kDigest);  // block 0 is the header
    CHECK(*f.copier->wait(load, kPatience) == PagedCopier::Results{0});
}

TEST_CASE(results_are_given_once) {
    Fixture f;
    const auto job = f.submit_store(0, 2);
    CHECK(*f.copier->wait(job, kPatience) == kBothGood);
    for (const auto gone : {job, job + 1}) CHECK(refused([&] { f.copier->wait(gone, 0); }));
    CHECK(f.copier->wait(f.copier->submit_load(f.group, {}, {}, {}, kDigest), 0)->empty());
}

template <class Call>
std::string refusal(Call&& call) {
    try {
        call();
    } catch (const std::invalid_argument& refused) {
        return refused.what();
    }
    return "";
}

bool mentions(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

TEST_CASE(wrong_arguments_are_refused) {
    Fixture f;
    const auto address = reinterpret_cast<std::uintptr_t>(f.arena);
    CHECK(mentions(refusal([&] { PagedCopier(address + 1, kFrame, 1); }), "arena_address"));
    CHECK(mentions(refusal([&] { PagedCopier(address, kFrame, 0); }), "threads"));
    CHECK(mentions(refusal([&] { PagedCopier(address, kFrame, kMaxCopyThreads + 1); }), "threads"));

    using Slots = std::vector<std::uint64_t>;
    using Blocks = std::vector<std::int64_t>;
    const auto hash = hashes_from(0, 1);
    const auto load = [&](std::size_t group, const Slots& slots, const Blocks& blocks) {
        return refusal([&] { f.copier->submit_load(group, slots, blocks, hash, kDigest); });
    };
    const auto store = [&](const Blocks& blocks, const FrameHeader& header) {
        return refusal([&] { f.copier->submit_store(f.group, Slots{0}, blocks, hash, as_bytes(header)); });
    };
    CHECK(mentions(load(7, {0}, {0, 1}), "group 7"));
    CHECK(mentions(load(f.group, {32}, {0, 1}), "slot 32"));
    CHECK(mentions(load(f.group, {(kSlots - 1) * kFrame + 64}, {0, 1}), "leaves the arena"));
    CHECK(mentions(load(f.group, {kNoSlot - 63}, {0, 1}), "leaves the arena"));
    CHECK(mentions(load(f.group, {0}, {0}), "2 ids for each slot"));
    CHECK(mentions(load(f.group, {0}, {0, kNumBlocks}), "block id 32"));
    CHECK(mentions(load(f.group, {0}, {-2, 0}), "block id -2"));
    CHECK(mentions(store({-1, 0}, f.header), "block id -1"));
    CHECK(mentions(store({0, 1}, frame_template({}, kDigest, kPayload + 1, "", {})), "the template is for"));
    CHECK(mentions(store({0, 1}, FrameHeader{}), "template"));
    CHECK(mentions(refusal([&] { f.copier->submit_load(f.group, Slots{0}, Blocks{0, 1}, {}, kDigest); }), "hashes"));
    CHECK(mentions(refusal([&] { f.copier->submit_load(f.group, Slots{0}, Blocks{0, 1}, hash, {}); }), "digest"));
}

TEST_CASE(closing_finishes_what_was_submitted) {
    Fixture f(1);
    std::vector<PagedCopier::JobId> jobs;
    for (std::size_t i = 0; i < 8; ++i) jobs.push_back(f.submit_store(i, 1));
    f.copier->close();
    f.copier->close();
    for (const auto job : jobs) CHECK(*f.copier->wait(job, 0) == PagedCopier::Results{1});
    CHECK(mentions(refusal([&] { f.copier->submit_load(f.group, {}, {}, {}, kDigest); }), "closed"));
}

TEST_CASE(many_threads_may_use_one_copier) {
    Fixture f(3);
    std::vector<std::thread> users;
    for (std::size_t user = 0; user < 4; ++user) {
        users.emplace_back([&f, user] {
            for (int round = 0; round < 20; ++round) {
                CHECK(f.store(4 * user, 4) == PagedCopier::Results(4, 1));
                CHECK(f.load(4 * user, 4) == PagedCopier::Results(4, 1));
            }
        });
    }
    for (std::thread& user : users) user.join();
}

}  // namespace
