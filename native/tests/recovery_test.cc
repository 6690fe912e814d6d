// What one core leaves in shared memory and the next one recovers: exactly the committed, permanent objects, whatever
// came before and whatever was damaged meanwhile.
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>

#include "check.h"
#include "lmcache/frame.h"
#include "lmcache/l1_core.h"

using namespace lmcache;

namespace {

constexpr std::uint64_t kUnit = 4096;
constexpr double kForever = 1e18;
constexpr Owner kStorage = -1;

std::vector<std::uint8_t> hash_of(std::uint64_t number) {
    std::vector<std::uint8_t> hash(kChunkHashBytes);
    std::mt19937_64 random(number);
    for (std::uint8_t& byte : hash) byte = static_cast<std::uint8_t>(random());
    return hash;
}

Digest digest_of(std::uint8_t number) {
    Digest digest{};
    digest[0] = number;
    return digest;
}

// The memory that outlives a core: a table, then slots.
class Memory {
public:
    explicit Memory(std::uint32_t units)
        : units_(units),
          table_(units),
          slots_(static_cast<std::byte*>(std::aligned_alloc(kUnit, units * kUnit)), &std::free) {}

    std::unique_ptr<L1Core> start() {
        auto core = std::make_unique<L1Core>(L1Options{units_ * kUnit, kUnit, kUnit, EvictionPolicy::kLru,
                                                       reinterpret_cast<std::uintptr_t>(table_.data())});
        core->set_committed(units_ * kUnit);
        return core;
    }
    RecoveredFrames recovered(std::uint32_t committed_units = 0, std::size_t threads = 3) const {
        return recover_frames(SlotTable(reinterpret_cast<std::uintptr_t>(table_.data())), slots_.get(),
                              committed_units ? committed_units : units_, kUnit, threads);
    }
    std::byte* at(std::uint64_t offset) { return slots_.get() + (offset - kUnit); }
    std::uint64_t& word(std::uint32_t unit) { return table_[unit]; }

    void seal(std::uint64_t offset, std::uint64_t number, std::uint8_t name_space, std::uint64_t payload_bytes) {
        const std::string encoded = "namespace " + std::to_string(name_space);
        const Digest digest = digest_of(name_space);
        const FrameHeader header =
            frame_template(std::as_bytes(std::span(encoded)), std::as_bytes(std::span(digest)), payload_bytes, "", {});
        const auto hash = hash_of(number);
        std::memset(at(offset) + kFrameHeaderBytes, static_cast<int>(number), payload_bytes);
        frame_seal(at(offset), header,
                   std::span<const std::byte, kChunkHashBytes>(reinterpret_cast<const std::byte*>(hash.data()),
                                                               kChunkHashBytes));
    }

private:
    std::uint32_t units_;
    std::vector<std::uint64_t> table_;
    std::unique_ptr<std::byte, decltype(&std::free)> slots_;
};

struct Put {
    std::uint64_t reservation = 0;
    std::uint64_t offset = kNoSlot;
};

// Reserves and fills one slot; the payload is `units` less the header.
Put put(Memory& memory, L1Core& core, Owner owner, std::uint64_t number, std::uint8_t name_space = 0,
        std::uint64_t units = 2) {
    const std::vector<std::uint64_t> sizes{units * kUnit};
    const Reserved reserved =
        core.reserve(owner, std::vector{digest_of(name_space)}, "", sizes, hash_of(number), kForever);
    if (reserved.reservation != 0) {
        memory.seal(reserved.slots[0], number, name_space, units * kUnit - kFrameHeaderBytes);
    }
    return {reserved.reservation, reserved.slots[0]};
}

std::vector<std::optional<std::string>> salts_of(const RecoveredFrames& found) {
    return std::vector<std::optional<std::string>>(found.namespaces.size(), "");
}

bool is_resident(L1Core& core, std::uint64_t number, std::uint8_t name_space = 0) {
    return core.probe(std::vector{digest_of(name_space)}, hash_of(number)) == 1;
}

TEST_CASE(committed_frames_are_recovered_and_nothing_else) {
    Memory memory(64);
    auto first = memory.start();
    for (std::uint64_t number = 0; number < 6; ++number) {
        first->commit(put(memory, *first, 1, number, number % 2).reservation, {}, {});
    }
    put(memory, *first, 2, 10);                                       // whole, but not committed; its owner runs
    put(memory, *first, 3, 11);                                       // the same of an owner that does not
    first->commit(put(memory, *first, kStorage, 12).reservation, {},  // to leave with its lease
                  {.lease_owner = 9, .deadline = kForever, .temporary = true});
    first->commit(put(memory, *first, kStorage, 13).reservation, {},  // leased, to stay
                  {.lease_owner = 9, .deadline = kForever, .temporary = false});
    put(memory, *first, kStorage, 14);  // being loaded
    first->abort(put(memory, *first, 1, 15).reservation);
    const std::vector<Digest> id{digest_of(1)};
    CHECK(first->remove(id, hash_of(3)) == 1);
    first->check();

    auto second = memory.start();
    const RecoveredFrames found = memory.recovered();
    CHECK(found.frames.size() == 6 && found.slots.size() == 3 && found.refused.empty());
    CHECK(found.namespaces.size() == 2);
    const std::vector<Owner> live{2, kStorage, 77};
    const Recovered recovered = second->recover(found, salts_of(found), live);
    second->check();
    CHECK(recovered.objects == 6 && recovered.size_bytes == 12 * kUnit && recovered.refused == 0);
    CHECK(recovered.quarantined.size() == 2 && recovered.quarantined_bytes == 4 * kUnit);
    for (std::uint64_t number : {0, 1, 2, 4, 5}) CHECK(is_resident(*second, number, number % 2));
    CHECK(is_resident(*second, 13));
    for (std::uint64_t number : {3, 10, 11, 12, 14, 15}) CHECK(!is_resident(*second, number, number == 3));
    CHECK(second->stats().quarantined_bytes == 4 * kUnit);

    // A third core finds the same: what was in quarantine still is.
    auto third = memory.start();
    const RecoveredFrames again = memory.recovered();
    CHECK(again.frames.size() == 6 && again.slots.size() == 2 && again.refused.empty());
    third->recover(again, salts_of(again), live);
    third->check();
    CHECK(third->drop_owner(2).reservations == 1);
    for (const auto& [owner, reservation] : recovered.quarantined) {
        if (owner == kStorage) CHECK(second->abort(reservation));
    }
    CHECK(third->stats().quarantined_bytes == 2 * kUnit);
    third->check();
}

TEST_CASE(the_order_of_uses_is_kept) {
    Memory memory(16);
    auto first = memory.start();
    for (std::uint64_t number = 0; number < 8; ++number) {
        first->commit(put(memory, *first, 1, number).reservation, {}, {});
    }
    const std::vector<Digest> id{digest_of(0)};
    for (std::uint64_t number : {5, 0, 3}) CHECK(first->touch(id, hash_of(number)) == 1);
    const Acquired held = first->acquire(4, id, hash_of(6), kForever);
    CHECK(held.chunks == 1 && first->release(held.lease));
    auto second = memory.start();
    const RecoveredFrames found = memory.recovered();
    second->recover(found, salts_of(found), {});
    for (std::uint64_t number : {1, 2, 4, 7, 5, 0, 3, 6}) {
        CHECK(is_resident(*second, number));
        CHECK(second->evict(1).objects == 1);
        CHECK(!is_resident(*second, number));
    }
    CHECK(memory.recovered().frames.empty());
}

TEST_CASE(the_order_holds_where_the_counter_wraps_around) {
    Memory memory(16);
    auto first = memory.start();
    for (std::uint64_t number = 0; number < 4; ++number) {
        first->commit(put(memory, *first, 1, number).reservation, {}, {});
    }
    RecoveredFrames found = memory.recovered();
    for (std::size_t i = 0; i < 4; ++i) found.frames[i].last_use = static_cast<std::uint32_t>(i) - 2;
    auto second = memory.start();
    second->recover(found, salts_of(found), {});
    for (std::uint64_t number = 0; number < 4; ++number) {
        CHECK(second->evict(1).objects == 1);
        CHECK(!is_resident(*second, number));
    }
}

TEST_CASE(damage_is_refused) {
    Memory memory(64);
    auto first = memory.start();
    std::vector<Put> puts;
    for (std::uint64_t number = 0; number < 10; ++number) {
        puts.push_back(put(memory, *first, 1, number));
        first->commit(puts.back().reservation, {}, {});
    }
    const Put staged = put(memory, *first, 8, 20);
    const auto unit = [](const Put& one) { return static_cast<std::uint32_t>(one.offset / kUnit - 1); };
    memory.at(puts[0].offset)[50] ^= std::byte{1};         // hash
    memory.at(puts[1].offset)[0] ^= std::byte{1};          // magic
    memory.at(puts[2].offset)[8] ^= std::byte{4};          // version
    memory.word(unit(puts[3])) ^= std::uint64_t{1} << 33;  // length
    memory.word(unit(puts[4])) |= std::uint64_t{3} << 62;  // kind
    memory.word(unit(puts[5])) = 0;
    memory.word(63) = std::uint64_t{1} << 62 | std::uint64_t{2} << 32;                     // beyond the end
    memory.word(unit(puts[6]) + 1) = std::uint64_t{2} << 62 | std::uint64_t{1} << 32 | 8;  // overlaps the seventh
    memory.at(puts[7].offset)[kFrameHeaderBytes] ^= std::byte{1};  // payload: for the reader to find
    const RecoveredFrames found = memory.recovered();
    auto second = memory.start();
    const Recovered recovered = second->recover(found, salts_of(found), std::vector<Owner>{8});
    second->check();
    CHECK(recovered.objects == 3 && is_resident(*second, 7) && is_resident(*second, 8) && is_resident(*second, 9));
    CHECK(recovered.refused == 7);
    CHECK(recovered.quarantined_bytes == 3 * kUnit);
    CHECK(memory.recovered().refused.empty() && memory.recovered().frames.size() == 3);
    CHECK(staged.offset != kNoSlot);

    Memory twice(8);
    auto previous = twice.start();
    previous->commit(put(twice, *previous, 1, 1).reservation, {}, {});
    const Put copy = put(twice, *previous, 1, 2);
    previous->commit(copy.reservation, {}, {});
    twice.seal(copy.offset, 1, 0, kUnit);  // the same key in two places
    auto next = twice.start();
    const RecoveredFrames both = twice.recovered();
    CHECK(next->recover(both, salts_of(both), {}).objects == 1);
    next->check();
    CHECK(refused([&] { next->recover(both, salts_of(both), {}); }));
    auto refusing = twice.start();
    CHECK(refusing->recover(twice.recovered(), std::vector<std::optional<std::string>>{std::nullopt}, {}).objects == 0);
    CHECK(twice.recovered().frames.empty());
}

// After every step, what could be found by a successor is what the core holds.
void random_steps(std::uint64_t seed) {
    constexpr std::uint32_t kUnits = 48;
    Memory memory(kUnits);
    auto core = memory.start();
    std::mt19937_64 random(seed);
    std::map<std::uint64_t, Owner> open;  // reservations
    std::vector<std::uint64_t> leases;
    for (int step = 0; step < 4000; ++step) {
        const std::uint64_t number = random() % 30;
        const auto name_space = static_cast<std::uint8_t>(number % 3);
        const std::vector<Digest> id{digest_of(name_space)};
        switch (random() % 12) {
            case 0:
            case 1:
            case 2: {
                const Owner owner = random() % 4 == 0 ? kStorage : Owner(1 + random() % 3);
                const Put one = put(memory, *core, owner, number, name_space, 1 + random() % 4);
                if (one.reservation != 0) open.emplace(one.reservation, owner);
                break;
            }
            case 3:
            case 4:
            case 5:
                if (!open.empty()) {
                    const auto [reservation, owner] = *open.begin();
                    const bool leased = random() % 2;
                    const bool temporary = leased && owner == kStorage;
                    const Committed done = core->commit(
                        reservation, {}, {.lease_owner = leased ? 7 : 0, .deadline = kForever, .temporary = temporary});
                    if (done.lease) leases.push_back(done.lease);
                    open.erase(open.begin());
                }
                break;
            case 6:
                if (!open.empty() && core->abort(open.rbegin()->first)) open.erase(std::prev(open.end()));
                break;
            case 7: {
                const Acquired got = core->acquire(7, id, hash_of(number), kForever);
                if (got.lease) leases.push_back(got.lease);
                break;
            }
            case 8:
            case 9:
                if (!leases.empty()) {
                    core->release(leases.back());
                    leases.pop_back();
                }
                break;
            case 10:
                if (random() % 10 == 0) core->clear();
                core->touch(id, hash_of(number));
                break;
            default:
                core->remove(id, hash_of(number));
                break;
        }
        if (step % 500 == 499) {  // a crash: the next core goes on with what there is
            auto next = memory.start();
            const RecoveredFrames found = memory.recovered(0, 1);
            next->recover(found, salts_of(found), std::vector<Owner>{2});
            next->check();
            CHECK(next->stats().objects == found.frames.size());
            core = std::move(next);
            open.clear();
            leases.clear();
            core->drop_owner(2);
        }
        const RecoveredFrames found = memory.recovered(0, 1);
        CHECK(found.refused.empty());
        const L1Stats stats = core->stats();
        std::uint64_t staged_units = 0;
        for (const UncommittedSlot& slot : found.slots) staged_units += slot.units;
        CHECK(found.slots.size() == stats.staged);
        CHECK(found.frames.size() <= stats.objects);  // temporary ones are not kept
        std::set<std::vector<std::uint8_t>> resident;
        const ObjectPage page = core->list_objects(0, 1000);
        for (std::size_t i = 0; i < page.positions.size(); ++i) {
            resident.emplace(&page.hashes[i * kChunkHashBytes], &page.hashes[i * kChunkHashBytes] + kChunkHashBytes);
        }
        for (const RecoveredFrame& frame : found.frames) {
            CHECK(resident.contains({frame.hash.begin(), frame.hash.end()}));
        }
    }
    for (const std::uint64_t lease : leases) core->release(lease);
    for (const auto& [reservation, owner] : open) core->abort(reservation);
    CHECK(memory.recovered().frames.size() == core->stats().objects && memory.recovered().slots.empty());
    core->clear();
    CHECK(memory.recovered().frames.empty());
    core->check();
}

TEST_CASE(without_a_table_nothing_is_found) {
    CHECK(recover_frames(SlotTable(0), nullptr, 100, kUnit, 2).frames.empty());
    CHECK(refused([&] { L1Core({kUnit, kUnit, kUnit, EvictionPolicy::kLru, 4}); }));
}

TEST_CASE(random_steps_leave_what_is_there) {
    for (std::uint64_t seed = 1; seed <= 3; ++seed) random_steps(seed);
}

}  // namespace
