// The directory of a fleet under several threads, and what random calls from Python (tests/unit/fleet) do not reach:
// growth, many copies of one key, and sweeps beside other calls.
#include "lmcache/fleet_directory.h"

#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

using namespace lmcache;

namespace {

constexpr std::uint64_t kObjectBytes = 65'536;

FleetKeys keys(std::uint64_t first, std::size_t count, const std::string& scope = "scope",
               const std::string& variant = "") {
    FleetKeys result;
    result.scopes.push_back(scope);
    result.variant = variant;
    result.positions.assign(count, 0);
    result.hashes.resize(count * kChunkHashBytes);
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t number = first + i;
        std::memcpy(&result.hashes[i * kChunkHashBytes + 1], &number, sizeof(number));
    }
    return result;
}

std::vector<std::uint64_t> sizes(std::size_t count) { return std::vector<std::uint64_t>(count, kObjectBytes); }

}  // namespace

TEST_CASE(growth_keeps_every_key) {
    constexpr std::size_t kCount = 200'000, kStep = 1000;
    FleetDirectory directory(kCount);
    const std::uint32_t holder = directory.add_holder(1);
    for (std::size_t first = 0; first < kCount; first += kStep)
        CHECK(directory.store(holder, keys(first, kStep), sizes(kStep)) == kStep);
    directory.check();
    CHECK(directory.stats().records == kCount && directory.stats().keys == kCount);
    CHECK(directory.lookup(keys(kCount - 500, 1000), 8).keys.size() == 500);
    CHECK(directory.store(holder, keys(kCount, 1), sizes(1)) == 0);  // full
    CHECK(directory.store(holder, keys(0, 1), sizes(1)) == 1);
    CHECK(directory.stats().memory_bytes < 64 * kCount + (2 << 20));
    for (std::size_t first = 0; first < kCount; first += 2 * kStep)
        CHECK(directory.remove(holder, keys(first, kStep)) == kStep);
    directory.check();
    CHECK(directory.holder_stats(holder).bytes == kCount / 2 * kObjectBytes);
}

TEST_CASE(a_key_of_a_thousand_servers_loses_them_one_by_one) {
    FleetDirectory directory(10'000);
    std::vector<std::uint32_t> holders;
    for (std::uint32_t place = 0; place < 1000; ++place) {
        holders.push_back(directory.add_holder(place));
        directory.store(holders.back(), keys(7, 2), sizes(2));
    }
    CHECK(directory.lookup(keys(7, 1), 64).keys.size() == 64);
    CHECK(directory.count_accesses(keys(7, 1)) == 1);
    for (std::size_t i = 0; i < holders.size(); i += 2) directory.void_holder(holders[i]);
    CHECK(directory.lookup(keys(7, 1), 10'000).keys.size() == 500);
    CHECK(directory.stats().void_records == 1000);
    while (directory.sweep(100)) directory.check();
    CHECK(directory.stats().void_records == 0 && directory.stats().holders == 500);
    CHECK(directory.lookup(keys(7, 1), 1).access_counts[0] == 1);
    for (std::size_t i = 1; i < holders.size(); i += 2) CHECK(directory.remove(holders[i], keys(7, 2)) == 2);
    directory.check();
    CHECK(directory.stats().keys == 0 && directory.stats().scopes == 0);
}

TEST_CASE(what_is_told_again_moves_to_the_new_life_of_its_place) {
    FleetDirectory directory(100);
    const std::uint32_t before = directory.add_holder(3), after = directory.add_holder(3);
    directory.store(before, keys(0, 10), sizes(10));
    directory.store(after, keys(0, 4), sizes(4));
    CHECK(directory.lookup(keys(0, 10), 8).keys.size() == 10);
    directory.void_holder(before);
    directory.void_holder(before);
    CHECK(directory.lookup(keys(0, 10), 8).keys.size() == 4);
    directory.store(after, keys(9, 1), sizes(1));  // void, and here again
    directory.check();
    CHECK(directory.lookup(keys(0, 10), 8).keys.size() == 5);
    CHECK(!directory.sweep(1000));
    CHECK(directory.list(0, 100, 100, {}).keys.empty() && directory.list(0, 100, 100, {}).positions.size() == 5);
    CHECK(refused([&] { directory.holder_stats(before); }));
}

TEST_CASE(variants_of_a_scope_are_found_together_and_removed_apart) {
    FleetDirectory directory(100);
    const std::uint32_t holder = directory.add_holder(1);
    directory.store(holder, keys(0, 3, "scope", "one"), sizes(3));
    directory.store(holder, keys(0, 3, "scope", "other"), sizes(3));
    CHECK(directory.lookup(keys(0, 3), 8).keys.size() == 6);
    CHECK(directory.remove(holder, keys(0, 3, "scope", "one")) == 3);
    const FleetPage left = directory.lookup(keys(0, 3), 8);
    CHECK(left.keys.size() == 3 && left.variants == std::vector<std::string>{"other"});
    for (std::size_t i = 0; i < 2 * FleetDirectory::kMostVariants; ++i)
        directory.store(holder, keys(0, 1, "many", std::to_string(i)), sizes(1));
    CHECK(directory.lookup(keys(0, 1, "many"), 1000).keys.size() == FleetDirectory::kMostVariants);
    directory.check();
}

TEST_CASE(sizes_beyond_2_gib_are_whole_pages) {
    FleetDirectory directory(100);
    const std::uint32_t holder = directory.add_holder(1);
    for (const std::uint64_t size : {std::uint64_t{0}, (std::uint64_t{1} << 31) - 1, (std::uint64_t{1} << 32) + 4096}) {
        directory.store(holder, keys(0, 1), std::vector<std::uint64_t>{size});
        CHECK(directory.lookup(keys(0, 1), 1).sizes_bytes[0] == size);
        CHECK(directory.holder_stats(holder).bytes == size && directory.holder_stats(holder).objects == 1);
    }
    directory.store(holder, keys(0, 1), std::vector<std::uint64_t>{(std::uint64_t{1} << 32) + 1});
    CHECK(directory.lookup(keys(0, 1), 1).sizes_bytes[0] == (std::uint64_t{1} << 32) + 4096);
}

TEST_CASE(threads_tell_ask_void_and_sweep_at_the_same_time) {
    FleetDirectory directory(1 << 20);
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (std::uint32_t place = 0; place < 3; ++place) {
        threads.emplace_back([&, place] {
            std::mt19937_64 random(place);
            std::uint32_t holder = directory.add_holder(place);
            for (int round = 0; round < 300; ++round) {
                const FleetKeys some =
                    keys(random() % 1000, 1 + random() % 50, "scope " + std::to_string(random() % 3));
                if (random() % 3 == 0) {
                    directory.remove(holder, some);
                } else {
                    directory.store(holder, some, sizes(some.size()));
                }
                if (random() % 20 == 0) {
                    const std::uint32_t next = directory.add_holder(place);
                    directory.void_holder(holder);
                    holder = next;
                }
            }
        });
    }
    std::thread reader([&] {
        while (!stop) {
            directory.lookup(keys(0, 500, "scope 1"), 8);
            directory.list(0, 100, 1000, {});
            directory.sweep(50);
        }
    });
    for (std::thread& thread : threads) thread.join();
    stop = true;
    reader.join();
    directory.check();
    while (directory.sweep(1000)) {
    }
    directory.check();
    CHECK(directory.stats().void_records == 0 && directory.stats().holders == 3);
}
