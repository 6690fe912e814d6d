// The arena against a map of units.
#include "lmcache/arena.h"

#include <algorithm>
#include <map>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.h"

using lmcache::Arena;

namespace {

constexpr std::uint32_t kUnits = 600;

// What best fit, lowest address first, must choose.
std::optional<std::uint32_t> best_fit(const std::vector<std::uint32_t>& tenants, std::uint32_t committed,
                                      std::uint32_t units) {
    std::optional<std::uint32_t> best;
    std::uint32_t best_length = ~std::uint32_t{0};
    for (std::uint32_t at = 0; at < committed;) {
        if (tenants[at] != Arena::kFree) {
            ++at;
            continue;
        }
        std::uint32_t end = at;
        while (end < committed && tenants[end] == Arena::kFree) ++end;
        if (end - at >= units && end - at < best_length) {
            best = at;
            best_length = end - at;
        }
        at = end;
    }
    return best;
}

void random_operations(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Arena arena(kUnits);
    std::vector<std::uint32_t> tenants(kUnits, Arena::kFree);
    std::map<std::uint32_t, std::pair<std::uint32_t, std::uint32_t>> held;  // tenant: first, units
    std::uint32_t committed = 0;
    for (std::uint32_t step = 0; step < 30000; ++step) {
        if (committed < kUnits && random() % 100 == 0) {
            committed = std::min<std::uint32_t>(kUnits, committed + random() % 120);
            arena.set_committed(committed);
        }
        if (random() % 6 == 0) {
            const auto first = static_cast<std::uint32_t>(random() % kUnits);
            const auto units = static_cast<std::uint32_t>(1 + random() % 24);
            const bool fits =
                first + units <= committed && std::all_of(tenants.begin() + first, tenants.begin() + first + units,
                                                          [](auto t) { return t == Arena::kFree; });
            CHECK(arena.allocate_at(first, units, step) == fits);
            if (fits) {
                std::fill_n(tenants.begin() + first, units, step);
                held[step] = {first, units};
            }
        } else if (random() % 2 == 0) {
            const auto units = static_cast<std::uint32_t>(1 + random() % 24);
            const auto first = arena.allocate(units, step);
            CHECK(first == best_fit(tenants, committed, units));
            if (first) {
                std::fill_n(tenants.begin() + *first, units, step);
                held[step] = {*first, units};
            }
        } else if (!held.empty()) {
            auto chosen = std::next(held.begin(), static_cast<std::ptrdiff_t>(random() % held.size()));
            auto [tenant, place] = *chosen;
            if (random() % 4 == 0) {
                arena.reassign(place.first, tenant, step);
                std::fill_n(tenants.begin() + place.first, place.second, step);
                held.erase(chosen);
                held[step] = place;
            } else {
                arena.free(place.first, tenant);
                std::fill_n(tenants.begin() + place.first, place.second, Arena::kFree);
                held.erase(chosen);
            }
        }
        const auto used = std::count_if(tenants.begin(), tenants.end(), [](auto t) { return t != Arena::kFree; });
        CHECK(arena.used_units() == static_cast<std::uint32_t>(used));
        CHECK(arena.used_units() + arena.free_units() == committed);
        const std::uint32_t largest = arena.largest_free();
        CHECK(largest == 0 || best_fit(tenants, committed, largest));
        CHECK(!best_fit(tenants, committed, largest + 1));
        if (step % 500 == 0) arena.check();
    }
    for (const auto& [tenant, place] : held) arena.free(place.first, tenant);
    arena.check();
    CHECK(arena.largest_free() == committed);
}

TEST_CASE(neighbours_are_known) {
    Arena arena(100);
    CHECK(!arena.extent_before(0) && !arena.extent_at(0));
    arena.set_committed(100);
    CHECK(*arena.allocate(10, 1) == 0);
    CHECK(*arena.allocate(20, 2) == 10);
    CHECK(!arena.extent_before(0));
    CHECK(arena.extent_before(10)->tenant == 1 && arena.extent_before(10)->units == 10);
    CHECK(arena.extent_at(10)->tenant == 2 && arena.extent_at(10)->end() == 30);
    CHECK(arena.extent_at(30)->tenant == Arena::kFree && arena.extent_at(30)->units == 70);
    CHECK(arena.extent_before(100)->first == 30);
    CHECK(!arena.extent_at(100));
}

TEST_CASE(misuse_is_noticed) {
    Arena arena(10);
    arena.set_committed(5);
    CHECK(!arena.allocate(6, 1));
    CHECK(*arena.allocate(2, 1) == 0);
    CHECK(refused<std::logic_error>([&] { arena.free(0, 2); }));
    CHECK(refused<std::logic_error>([&] { arena.free(1, 1); }));
    arena.free(0, 1);
    CHECK(refused<std::logic_error>([&] { arena.free(0, 1); }));
    CHECK(refused<std::logic_error>([&] { arena.set_committed(11); }));
    arena.set_committed(3);
    CHECK(arena.committed() == 5);
    arena.check();
}

TEST_CASE(random_operations_match_a_map_of_units) {
    random_operations(1);
    random_operations(2);
}

}  // namespace
