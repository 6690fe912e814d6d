// The key table against std::unordered_map, with hashes that collide.
#include "lmcache/key_table.h"

#include <random>
#include <stdexcept>
#include <unordered_map>

#include "check.h"

using lmcache::KeyTable;
using lmcache::kNoObject;

namespace {

std::uint32_t find(const KeyTable& table, std::uint64_t hash, std::uint32_t wanted) {
    return table.find(hash, [&](std::uint32_t index) { return index == wanted; });
}

// `mask` leaves few different hashes, so that runs are long and wrap around.
void random_operations(std::uint64_t seed, std::uint64_t mask) {
    std::mt19937_64 random(seed);
    KeyTable table;
    std::unordered_map<std::uint32_t, std::uint64_t> model;  // index: hash
    for (int step = 0; step < 40000; ++step) {
        const auto index = static_cast<std::uint32_t>(random() % 3000);
        const auto entry = model.find(index);
        if (entry == model.end()) {
            CHECK(find(table, random() & mask, index) == kNoObject);
            const std::uint64_t hash = random() & mask;
            table.insert(hash, index);
            model[index] = hash;
        } else if (random() % 2) {
            CHECK(find(table, entry->second, index) == index);
        } else {
            table.erase(entry->second, index);
            CHECK(find(table, entry->second, index) == kNoObject);
            model.erase(entry);
        }
        if (step % 2000 == 0) {
            for (const auto& [other, hash] : model) CHECK(find(table, hash, other) == other);
            CHECK(table.size() == model.size());
        }
    }
}

TEST_CASE(memory_is_bounded) {
    std::mt19937_64 random(3);
    KeyTable table;
    constexpr std::uint32_t kKeys = 200000;
    for (std::uint32_t i = 0; i < kKeys; ++i) table.insert(random(), i);
    CHECK(table.memory_bytes() < kKeys * 24);
}

TEST_CASE(erasing_what_is_not_there_is_noticed) {
    KeyTable table;
    table.insert(7, 1);
    CHECK(refused<std::logic_error>([&] { table.erase(7, 2); }));
    CHECK(find(table, 7, 1) == 1);
}

TEST_CASE(random_operations_match_a_map) {
    random_operations(1, ~std::uint64_t{0});
    random_operations(2, 0x03000000'0000000fU);
    random_operations(3, 0x00000000'fffffff0U);
}

}  // namespace
