// Namespaces come and go with their objects: nothing stays of them, and what was stored for one is never found under
// another, whatever becomes of their numbers inside.
#include <atomic>
#include <cstring>
#include <ctime>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "check.h"
#include "lmcache/l1_core.h"

using namespace lmcache;

namespace {

constexpr std::uint64_t kUnit = 4096;
constexpr double kForever = 1e18;

Digest digest_of(std::uint64_t number) {
    Digest digest;
    for (std::size_t at = 0; at < digest.size(); at += sizeof number) {
        number = (number + 0x9E3779B97F4A7C15U) * 0xBF58476D1CE4E5B9U;
        number ^= number >> 31;
        std::memcpy(&digest[at], &number, sizeof number);
    }
    return digest;
}

std::string salt_of(std::uint64_t number) { return "salt " + std::to_string(number / 2); }

// The chunks are the same in all namespaces: only the namespace tells objects apart.
std::vector<std::uint8_t> hash_of(std::uint8_t chunk) { return std::vector<std::uint8_t>(kChunkHashBytes, chunk); }

L1Options options(std::uint64_t units, EvictionPolicy policy) {
    return {.capacity_bytes = units * kUnit, .first_offset = kUnit, .align_bytes = kUnit, .policy = policy};
}

TEST_CASE(looking_for_something_keeps_nothing) {
    L1Core core(options(64, EvictionPolicy::kIsolatedLru));
    core.set_committed(64 * kUnit);
    for (std::uint64_t number = 0; number < 1000; ++number) {
        const std::vector<Digest> unknown{digest_of(number), digest_of(number + 1)};
        CHECK(core.probe(unknown, hash_of(1)) == 0);
        CHECK(core.touch(unknown, hash_of(1)) == 0);
        CHECK(core.acquire(1, unknown, hash_of(1), kForever).lease == 0);
        CHECK(core.remove(std::vector{unknown[0]}, hash_of(1)) == 0);
        CHECK(core.usage_of(salt_of(number)) == 0);
        core.set_limit(salt_of(number), 8 * kUnit);
        core.set_limit(salt_of(number), 0);
    }
    const L1Stats stats = core.stats();
    CHECK(stats.namespaces == 0 && stats.salts == 0);
    core.check();
}

// What each slot holds, as its last writer knows it.
struct Written {
    std::uint64_t name_space;
    std::uint8_t chunk;
};

// Many more namespaces than objects: their numbers are used again all the time, and what is found is always what was
// stored under that very name.
void numbers_are_used_again_and_names_are_not_mixed_up(EvictionPolicy policy, std::uint64_t seed) {
    constexpr std::uint64_t kUnits = 40;
    constexpr std::uint64_t kNames = 5000;
    L1Core core(options(kUnits, policy));
    core.set_committed(kUnits * kUnit);
    std::mt19937_64 random(seed);
    std::map<std::uint64_t, Written> slots;  // by offset
    std::map<std::uint64_t, std::pair<std::uint64_t, Written>> open;
    std::vector<std::pair<std::uint64_t, std::uint64_t>> leases;  // with the offset that each protects
    std::vector<std::uint64_t> recent(64, 0);
    std::size_t hits = 0, most = 0;
    for (int step = 0; step < 10000; ++step) {
        const std::uint64_t number = random() % 3 ? recent[random() % recent.size()] : random() % kNames;
        const auto chunk = static_cast<std::uint8_t>(random() % 4);
        const std::vector<Digest> name{digest_of(number)};
        switch (random() % 8) {
            case 0:
            case 1: {
                const Reserved reserved = core.reserve(1 + number % 2, name, salt_of(number), std::vector{kUnit},
                                                       hash_of(chunk), static_cast<double>(step + 20));
                if (reserved.reservation == 0) break;
                for (const auto& [lease, offset] : leases) CHECK(offset != reserved.slots[0]);
                slots[reserved.slots[0]] = {number, chunk};
                open[reserved.reservation] = {reserved.slots[0], {number, chunk}};
                recent[random() % recent.size()] = number;
                break;
            }
            case 2:
            case 3:
                if (open.empty()) break;
                if (random() % 4) {
                    const Committed committed = core.commit(open.begin()->first, {}, {});
                    for (const CommitRecord& record : committed.records) {
                        CHECK(record.name_space == 0 && record.slot == open.begin()->second.first);
                    }
                }
                core.abort(open.begin()->first);
                open.erase(open.begin());
                break;
            case 4:
            case 5: {
                const Acquired acquired = core.acquire(3, name, hash_of(chunk), kForever);
                if (acquired.lease == 0) break;
                ++hits;
                const Written& written = slots.at(acquired.slots[0]);
                CHECK(written.name_space == number && written.chunk == chunk);
                leases.emplace_back(acquired.lease, acquired.slots[0]);
                break;
            }
            case 6:
                while (leases.size() > 6) {
                    CHECK(core.release(leases.back().first));
                    leases.pop_back();
                }
                if (random() % 4 == 0) core.remove(name, hash_of(chunk));
                break;
            default:
                if (random() % 20 == 0) core.expire(step);
                if (random() % 50 == 0) core.clear();
                if (random() % 10 == 0) core.enforce_limits();
                if (random() % 4 == 0) core.set_limit(salt_of(number), random() % 6 * kUnit);
                if (random() % 40 == 0) core.check();
                break;
        }
        const L1Stats stats = core.stats();
        CHECK(stats.namespaces <= kUnits);
        most = std::max<std::size_t>(most, stats.namespaces);
    }
    CHECK(hits > 100 && most > kUnits / 4);
    for (const auto& [lease, offset] : leases) core.release(lease);
    for (const auto& [reservation, slot] : open) core.abort(reservation);
    core.drop_owner(1);
    core.drop_owner(2);
    core.clear();
    for (std::uint64_t number = 0; number < kNames; ++number) core.set_limit(salt_of(number), 0);
    core.check();
    const L1Stats stats = core.stats();
    CHECK(stats.namespaces == 0 && stats.salts == 0 && stats.used_bytes == 0);
}

TEST_CASE(memory_follows_what_is_there) {
    L1Core core(options(4096, EvictionPolicy::kIsolatedLru));
    core.set_committed(4096 * kUnit);
    const auto store = [&](std::uint64_t number) {
        const std::vector<Digest> names{digest_of(2 * number), digest_of(2 * number + 1)};
        const Reserved reserved =
            core.reserve(1, names, "user " + std::to_string(number), std::vector{kUnit, kUnit}, hash_of(1), kForever);
        CHECK(core.commit(reserved.reservation, {}, {}).records.size() == 2);
    };
    for (std::uint64_t number = 0; number < 8000; ++number) store(number);
    const std::uint64_t index_bytes = core.stats().index_bytes;
    for (std::uint64_t number = 8000; number < 30000; ++number) store(number);
    const L1Stats stats = core.stats();
    CHECK(4 * stats.index_bytes <= 5 * index_bytes);
    CHECK(stats.objects == 4096 && stats.namespaces == 4096 && stats.salts <= 4096);
    CHECK(core.salt_usage().size() == stats.salts);
    core.check();
}

// Other threads take, use and give up names meanwhile.
TEST_CASE(many_threads) {
    constexpr std::uint64_t kUnits = 30;
    L1Core core(options(kUnits, EvictionPolicy::kIsolatedLru));
    core.set_committed(kUnits * kUnit);
    std::vector<std::atomic<std::uint64_t>> owners(kUnits + 1);  // the name whose object lies in each slot
    std::atomic<std::size_t> hits{0};
    std::vector<std::thread> threads;
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
        threads.emplace_back([&, seed] {
            std::mt19937_64 random(seed);
            for (int round = 0; round < 4000; ++round) {
                const std::uint64_t number = random() % 60;
                const std::vector<Digest> name{digest_of(number)};
                if (random() % 2) {
                    const Reserved reserved =
                        core.reserve(1, name, salt_of(number), std::vector{kUnit}, hash_of(1), kForever);
                    if (reserved.reservation == 0) continue;
                    owners[reserved.slots[0] / kUnit] = number;
                    core.commit(reserved.reservation, {}, {});
                } else if (const Acquired got = core.acquire(2, name, hash_of(1), kForever); got.lease != 0) {
                    CHECK(owners[got.slots[0] / kUnit] == number);
                    ++hits;
                    core.release(got.lease);
                }
                if (random() % 50 == 0) core.check();
                if (random() % 20 == 0) core.enforce_limits();
                if (random() % 20 == 0) core.set_limit(salt_of(number), random() % 4 * kUnit);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    core.check();
    CHECK(hits > 100);
}

// ---- what a call costs under the lock
// ---------------------------------------------------------------------------------

double processor_seconds() {
    timespec time{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// A batch of 16 times the keys takes about 16 times as long, where it took 256 times if each key looked at all of them.
template <typename Batch>
void is_linear(const char* what, Batch&& batch) {
    constexpr std::size_t kFew = 2048;
    double few = 1e9, many = 1e9;
    for (int round = 0; round < 5; ++round) few = std::min(few, batch(kFew));
    for (int round = 0; round < 2; ++round) many = std::min(many, batch(16 * kFew));
    std::printf("%s: 16 times the keys take %.1f times as long\n", what, many / few);
    CHECK(many < 90 * few);
}

template <typename Call>
double seconds_of(std::size_t keys, std::size_t names, Call&& call) {
    L1Core core(options(keys, EvictionPolicy::kIsolatedLru));
    core.set_committed(keys * kUnit);
    std::vector<Digest> digests;
    std::vector<std::uint8_t> hashes;
    for (std::size_t i = 0; i < keys; ++i) {
        digests.push_back(digest_of(i % names));
        std::vector<std::uint8_t> hash(kChunkHashBytes);
        std::memcpy(hash.data(), &i, sizeof i);
        hashes.insert(hashes.end(), hash.begin(), hash.end());
        const Reserved reserved =
            core.reserve(1, {&digests.back(), 1}, salt_of(2 * (i % names)), std::vector{kUnit}, hash, kForever);
        core.commit(reserved.reservation, {}, {.lease_owner = 1, .deadline = 1, .temporary = false});
    }
    const double began = processor_seconds();
    call(core, digests, hashes);
    return processor_seconds() - began;
}

TEST_CASE(batches_are_linear) {
    is_linear("acquire_each and release", [](std::size_t keys) {
        return seconds_of(keys, 64, [&](L1Core& core, auto& digests, auto& hashes) {
            const Acquired acquired = core.acquire_each(2, digests, hashes, kForever);
            CHECK(acquired.chunks == keys);
            CHECK(core.release(acquired.lease));
        });
    });
    is_linear("expire and remove", [](std::size_t keys) {
        return seconds_of(keys, 64, [&](L1Core& core, auto& digests, auto& hashes) {
            CHECK(core.expire(2).leases == keys);
            CHECK(core.remove(digests, hashes) == keys);
        });
    });
    is_linear("enforce_limits, a salt an object", [](std::size_t keys) {
        return seconds_of(keys, keys, [&](L1Core& core, auto& digests, auto& hashes) {
            core.drop_owner(1);
            CHECK(core.enforce_limits().objects == keys);
        });
    });
    is_linear("evict, a salt an object", [](std::size_t keys) {
        return seconds_of(keys, keys, [&](L1Core& core, auto& digests, auto& hashes) {
            core.drop_owner(1);
            CHECK(core.evict(keys * kUnit).objects == keys);
        });
    });
}

TEST_CASE(namespaces_are_never_mixed_up_under_any_policy) {
    for (const auto policy : {EvictionPolicy::kLru, EvictionPolicy::kIsolatedLru, EvictionPolicy::kS3Fifo}) {
        for (std::uint64_t seed = 1; seed <= 2; ++seed) numbers_are_used_again_and_names_are_not_mixed_up(policy, seed);
    }
}

}  // namespace
