#include "lmcache/age_samples.h"

#include "check.h"

using namespace lmcache;

namespace {

double the_time = 0;

TEST_CASE(ages_are_what_the_clock_says) {
    AgeSamples samples([] { return the_time; });
    samples.stored(7);
    the_time = 10;
    samples.used(7);
    the_time = 25;
    samples.used(7);
    samples.used(8);
    the_time = 31;
    samples.evicted(7);
    samples.gone(7);
    samples.evicted(7);
    const Ages ages = samples.take();
    CHECK((ages.reuse_gaps == std::vector<double>{10, 15}));
    CHECK(ages.lifetimes == std::vector<double>{31});
    CHECK(ages.idle_before_eviction == std::vector<double>{6});
    CHECK(samples.take().lifetimes.empty());
}

TEST_CASE(the_rate_is_a_part_of_the_keys) {
    AgeSamples samples(steady_seconds);
    CHECK(!samples.wants(12345));
    samples.set_rate(1);
    for (std::uint64_t hash = 0; hash < 1000; ++hash) CHECK(samples.wants(hash * 0x123456789ABCDEFU));
}

TEST_CASE(what_nobody_takes_is_bounded) {
    AgeSamples samples(steady_seconds);
    samples.stored(1);
    for (int i = 0; i < 100000; ++i) samples.used(1);
    CHECK(samples.take().reuse_gaps.size() == 65536);
}

}  // namespace
