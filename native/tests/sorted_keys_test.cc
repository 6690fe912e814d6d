// SortedKeys against std::set.
#include "lmcache/sorted_keys.h"

#include <random>
#include <set>
#include <stdexcept>

#include "check.h"

using lmcache::SortedKeys;

namespace {

void compare(const SortedKeys& keys, const std::set<std::uint64_t>& model, std::uint64_t probe) {
    const auto expected = model.lower_bound(probe);
    const auto found = keys.at_or_after(probe);
    CHECK(found.has_value() == (expected != model.end()));
    if (!found) {
        CHECK(keys.last().has_value() == !model.empty());
        if (!model.empty()) CHECK(keys[*keys.last()] == *model.rbegin());
        return;
    }
    CHECK(keys[*found] == *expected);
    const auto next = keys.next(*found);
    CHECK(next.has_value() == (std::next(expected) != model.end()));
    if (next) CHECK(keys[*next] == *std::next(expected));
    const auto previous = keys.previous(*found);
    CHECK(previous.has_value() == (expected != model.begin()));
    if (previous) CHECK(keys[*previous] == *std::prev(expected));
}

void random_operations(std::uint64_t seed, std::uint64_t range) {
    std::mt19937_64 random(seed);
    SortedKeys keys;
    std::set<std::uint64_t> model;
    bool growing = true;
    for (int step = 0; step < 60000; ++step) {
        if (step % 10000 == 0) growing = !growing || model.size() < 100;
        const std::uint64_t key = random() % range;
        if (random() % 8 < (growing ? 6U : 2U)) {
            if (model.insert(key).second) keys.insert(key);
        } else if (const auto found = keys.at_or_after(key)) {
            const std::uint64_t erased = keys[*found];
            if (random() % 2) {
                keys.erase(*found);
            } else {
                keys.erase(erased);
            }
            model.erase(erased);
        }
        compare(keys, model, random() % range);
        if (step % 1000 == 0) keys.check();
    }
    keys.check();
    CHECK(keys.size() == model.size());
    auto expected = model.begin();
    keys.for_each([&](std::uint64_t key) { CHECK(key == *expected++); });
    CHECK(expected == model.end());
}

TEST_CASE(memory_follows_the_number_of_keys) {
    SortedKeys keys;
    for (std::uint64_t key = 0; key < 100000; ++key) keys.insert(key * 7);
    CHECK(keys.memory_bytes() < 100000 * 20);
    for (std::uint64_t key = 0; key < 100000; ++key) {
        if (key % 50 != 0) keys.erase(key * 7);
    }
    keys.check();
    CHECK(keys.size() == 2000);
    CHECK(keys.memory_bytes() < 2000 * 200);
}

TEST_CASE(misuse_is_noticed) {
    SortedKeys keys;
    CHECK(refused<std::logic_error>([&] { keys.erase(5); }));
    keys.insert(5);
    CHECK(refused<std::logic_error>([&] { keys.insert(5); }));
    CHECK(refused<std::logic_error>([&] { keys.erase(4); }));
    CHECK(refused<std::logic_error>([&] { keys.erase(6); }));
    keys.replace(*keys.at_or_after(5), 9);
    CHECK(keys[*keys.at_or_after(0)] == 9);
    keys.check();
}

TEST_CASE(random_operations_match_a_set) {
    random_operations(1, 1 << 12);
    random_operations(2, ~std::uint64_t{0});
}

}  // namespace
