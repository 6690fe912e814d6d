// L1Core from many threads at once, and what tests in Python cannot reach. Its rules one by one are tested in Python.
#include "lmcache/l1_core.h"

#include <atomic>
#include <random>
#include <stdexcept>
#include <thread>

#include "check.h"

using namespace lmcache;

namespace {

constexpr std::uint64_t kUnit = 4096;
constexpr double kForever = 1e18;

std::vector<std::uint8_t> make_hashes(std::uint64_t prompt, std::size_t first, std::size_t count) {
    std::vector<std::uint8_t> hashes(count * kChunkHashBytes);
    for (std::size_t i = 0; i < count; ++i) {
        std::mt19937_64 random(prompt * 1000003 + first + i);
        for (std::size_t byte = 0; byte < kChunkHashBytes; ++byte) {
            hashes[i * kChunkHashBytes + byte] = static_cast<std::uint8_t>(random());
        }
    }
    return hashes;
}

struct Core {
    explicit Core(std::uint64_t units, EvictionPolicy policy = EvictionPolicy::kLru)
        : core({units * kUnit, kUnit, kUnit, policy}) {
        core.set_committed(units * kUnit);
        core.set_age_sample_rate(0.5);
        core.set_limit("", units * kUnit);
        core.set_limit("salt", units / 2 * kUnit);
    }
    L1Core core;
    const std::vector<Digest> namespaces{Digest{0}, Digest{1}};
};

// A word for every unit says who writes it and how many read it, so that two threads never disagree about a slot.
class Slots {
public:
    explicit Slots(std::size_t units) : states_(units + 1) {}

    void begin_write(std::uint64_t offset) { CHECK(at(offset).exchange(kWriting) == 0); }
    void end_write(std::uint64_t offset) { CHECK(at(offset).exchange(0) == kWriting); }
    void begin_read(std::uint64_t offset) { CHECK(at(offset)++ < kWriting); }
    void end_read(std::uint64_t offset) { CHECK(--at(offset) < kWriting); }

private:
    static constexpr std::uint32_t kWriting = 1U << 20;
    std::atomic<std::uint32_t>& at(std::uint64_t offset) { return states_[offset / kUnit]; }
    std::vector<std::atomic<std::uint32_t>> states_;
};

// None, or one for the second namespace, as of a group with a window.
std::vector<std::uint32_t> some_tails(std::mt19937_64& random) {
    if (random() % 2) return {};
    return {0, static_cast<std::uint32_t>(random() % 4)};
}

void store(Core& shared, Slots& slots, Owner owner, std::mt19937_64& random) {
    const std::vector<std::uint8_t> hashes = make_hashes(random() % 12, random() % 4, 1 + random() % 8);
    const std::vector<std::uint64_t> sizes(2, kUnit);
    std::vector<std::uint8_t> wanted;
    if (random() % 3 == 0) {
        wanted.resize(2 * hashes.size() / kChunkHashBytes);
        for (std::uint8_t& flag : wanted) flag = random() % 2;
    }
    const Reserved reserved = shared.core.reserve(owner, shared.namespaces, "salt", sizes, hashes, kForever, wanted);
    if (reserved.reservation == 0) return;
    for (std::size_t i = 0; i < reserved.slots.size(); ++i) {
        if (reserved.slots[i] == kNoSlot) continue;
        CHECK(wanted.empty() || wanted[i] != 0);
        slots.begin_write(reserved.slots[i]);
    }
    for (const std::uint64_t offset : reserved.slots) {
        if (offset != kNoSlot) slots.end_write(offset);
    }
    if (random() % 5 == 0) {
        CHECK(shared.core.abort(reserved.reservation));
    } else {
        shared.core.commit(reserved.reservation, {}, {});
    }
}

void load(Core& shared, Slots& slots, Owner owner, std::mt19937_64& random) {
    const std::vector<std::uint8_t> hashes = make_hashes(random() % 12, 0, 8);
    const Reading reading = random() % 2 ? Reading::kUse : Reading::kCopy;
    const std::vector<std::uint32_t> tails = some_tails(random);
    const Acquired acquired = shared.core.acquire(owner, shared.namespaces, hashes, kForever, reading, tails);
    if (acquired.lease == 0) return;
    CHECK(acquired.slots.size() == 2 * acquired.chunks);
    const auto is_needed = [&](std::size_t place) {  // [namespace][chunk]
        const std::uint32_t tail = tails.empty() ? 0 : tails[place / acquired.chunks];
        return tail == 0 || place % acquired.chunks + tail >= acquired.chunks;
    };
    for (std::size_t place = 0; place < acquired.slots.size(); ++place) {
        CHECK(is_needed(place) == (acquired.slots[place] != kNoSlot));
        if (is_needed(place)) slots.begin_read(acquired.slots[place]);
    }
    for (const std::uint64_t offset : acquired.slots) {
        if (offset != kNoSlot) slots.end_read(offset);
    }
    CHECK(shared.core.release(acquired.lease));
    CHECK(!shared.core.release(acquired.lease));
}

void upkeep(Core& shared, std::mt19937_64& random) {
    const std::vector<std::uint8_t> hashes = make_hashes(random() % 12, 0, 8);
    switch (random() % 9) {
        case 0:
            shared.core.evict(8 * kUnit);
            break;
        case 1:
            shared.core.clear();
            break;
        case 2:
            shared.core.check();
            break;
        case 3:
            CHECK(shared.core.stats().used_bytes <= shared.core.stats().capacity_bytes);
            break;
        case 4:
            shared.core.remove(std::vector<Digest>(8, shared.namespaces[1]), hashes);
            break;
        case 5:
            shared.core.expire(1.0);
            break;
        case 6:
            shared.core.list_objects(0, 10);
            shared.core.take_ages();
            shared.core.salt_usage();
            shared.core.take_overuses();
            shared.core.set_limit("salt", (20 + random() % 30) * kUnit);
            shared.core.enforce_limits();
            break;
        case 7:
            shared.core.touch(shared.namespaces, hashes, some_tails(random));
            break;
        default:
            shared.core.probe(shared.namespaces, hashes);
            shared.core.renew(1, kForever);
            break;
    }
}

void many_threads(EvictionPolicy policy) {
    constexpr int kThreads = 4;
    constexpr int kRounds = 800;
    Core shared(60, policy);
    Slots slots(60);
    std::vector<std::thread> threads;
    for (int number = 0; number < kThreads; ++number) {
        threads.emplace_back([&, number] {
            std::mt19937_64 random(static_cast<std::uint64_t>(number));
            const Owner owner = number + 1;
            for (int round = 0; round < kRounds; ++round) {
                switch (random() % 4) {
                    case 0:
                        store(shared, slots, owner, random);
                        break;
                    case 1:
                        upkeep(shared, random);
                        break;
                    default:
                        load(shared, slots, owner, random);
                        break;
                }
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    shared.core.check();
    const L1Stats stats = shared.core.stats();
    CHECK(stats.leases == 0 && stats.reservations == 0 && stats.staged == 0 && stats.leased_objects == 0);
    CHECK(stats.evicted_objects > 0);
    shared.core.clear();
    CHECK(shared.core.stats().used_bytes == 0);
}

TEST_CASE(mixed_sizes_evict_about_what_they_need) {
    constexpr std::uint64_t kUnits = 32768;
    Core shared(kUnits);
    const std::vector<Digest> name_space{shared.namespaces[0]};
    const auto put = [&](std::uint64_t prompt, std::size_t count, std::uint64_t units) {
        const Reserved reserved = shared.core.reserve(1, name_space, "", std::vector<std::uint64_t>{units * kUnit},
                                                      make_hashes(prompt, 0, count), 1);
        CHECK(reserved.chunks_without_room == 0);
        shared.core.commit(reserved.reservation, {}, {});
    };
    for (std::uint64_t prompt = 0; prompt < 64; ++prompt) put(prompt, 512, 1);
    // Used again in random order: the oldest lie scattered all over the arena.
    std::mt19937_64 random(5);
    for (int i = 0; i < 60000; ++i) shared.core.touch(name_space, make_hashes(random() % 64, random() % 512, 1));
    for (std::uint64_t prompt = 100; prompt < 116; ++prompt) put(prompt, 1, 128);
    const L1Stats stats = shared.core.stats();
    CHECK(stats.evicted_bytes >= 16 * 128 * kUnit);
    CHECK(stats.evicted_bytes <= 2 * 16 * 128 * kUnit);  // by age alone it would be 20 times that
    shared.core.check();
}

TEST_CASE(everything_in_use_is_a_refusal) {
    Core shared(4);
    const std::vector<Digest> name_space{shared.namespaces[0]};
    const std::vector<std::uint64_t> size{kUnit};
    const Reserved reserved = shared.core.reserve(1, name_space, "", size, make_hashes(1, 0, 4), 10.0);
    CHECK(shared.core.reserve(1, name_space, "", size, make_hashes(2, 0, 1), 10.0).chunks_without_room == 1);
    CHECK((shared.core.expire(10.0) == EndedClaims{0, 1}));
    CHECK(shared.core.reserve(1, name_space, "", size, make_hashes(2, 0, 1), 10.0).chunks_without_room == 1);
    CHECK(shared.core.commit(reserved.reservation, {}, {}).records.empty());
    CHECK((shared.core.drop_owner(1) == EndedClaims{0, 1}));
    CHECK(shared.core.reserve(1, name_space, "", size, make_hashes(2, 0, 4), 10.0).chunks_without_room == 0);
    shared.core.check();
}

// A long call that lets others in does not get its lock back from the one that closes.
TEST_CASE(closing_ends_a_long_call) {
    Core shared(1 << 16);
    const std::vector<Digest> name_space{shared.namespaces[0]};
    const std::vector<std::uint64_t> size{kUnit};
    for (std::uint64_t prompt = 0; prompt < 60'000 / 1'000; ++prompt) {
        const Reserved reserved = shared.core.reserve(1, name_space, "", size, make_hashes(prompt, 0, 1'000), 10.0);
        shared.core.commit(reserved.reservation, {}, {});
    }
    bool refused = false;
    std::thread clearing([&] {
        try {
            for (;;) shared.core.clear();
        } catch (const Closed&) {
            refused = true;
        }
    });
    shared.core.close();
    clearing.join();
    CHECK(refused);
}

TEST_CASE(many_threads_share_a_core_under_every_policy) {
    for (const auto policy : {EvictionPolicy::kLru, EvictionPolicy::kIsolatedLru, EvictionPolicy::kS3Fifo}) {
        many_threads(policy);
    }
}

}  // namespace
