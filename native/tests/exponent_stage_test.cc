#include "lmcache/exponent_stage.h"

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "lmcache/zstd_stage.h"

using namespace lmcache;

namespace {

using Bytes = std::vector<std::byte>;

constexpr const char* kPaths[] = {"portable", "avx2", "avx512"};

SerdeObject no_object() {
    static constexpr std::byte kNothing[32] = {};
    return {{}, std::span(kNothing), std::span(kNothing), {}};
}

// Elements of a normal distribution, as bfloat16 by truncation.
Bytes gaussian(std::size_t payload_bytes, double deviation, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0F, static_cast<float>(deviation));
    Bytes payload(payload_bytes);
    for (std::size_t at = 0; at + 2 <= payload_bytes; at += 2) {
        const float value = normal(random);
        std::memcpy(payload.data() + at, reinterpret_cast<const char*>(&value) + 2, 2);
    }
    return payload;
}

Bytes noise(std::size_t payload_bytes, unsigned seed) {
    std::mt19937 random(seed);
    Bytes payload(payload_bytes);
    for (std::byte& byte : payload) byte = static_cast<std::byte>(random());
    return payload;
}

Bytes encoded(const SerdeStage& stage, const Bytes& payload) {
    Bytes target(stage.max_encoded_bytes(payload.size()));
    std::vector<std::byte> parameters;
    const auto written = stage.encode(payload, target, no_object(), parameters);
    CHECK(written && *written <= target.size() && parameters.empty());
    return Bytes(target.begin(), target.begin() + static_cast<std::ptrdiff_t>(*written));
}

bool decodes_to(const SerdeStage& stage, const Bytes& source, const Bytes& payload) {
    Bytes target(payload.size(), std::byte{0xaa});
    return stage.decode(source, target, no_object(), {}) == SerdeFault::kNone && target == payload;
}

// What real and unreal payloads look like.
std::vector<Bytes> payloads() {
    std::vector<Bytes> all;
    for (const std::size_t size : {128UL, 129UL, 1000UL, 32768UL, 32770UL, 131072UL, 262145UL, 1000001UL})
        all.push_back(gaussian(size, 1.0, static_cast<unsigned>(size)));
    Bytes mixed = gaussian(400'000, 1e-3, 5);
    const Bytes large = gaussian(200'000, 1e20, 6);
    std::copy(large.begin(), large.end(), mixed.begin() + 100'000);
    for (std::size_t at = 0; at + 2 <= mixed.size(); at += 14) mixed[at] = mixed[at + 1] = std::byte{0};
    all.push_back(mixed);
    Bytes half_noise = gaussian(300'000, 1.0, 7);
    const Bytes random = noise(100'000, 8);
    std::copy(random.begin(), random.end(), half_noise.begin() + 150'000);
    all.push_back(half_noise);
    all.push_back(Bytes(100'000));
    return all;
}

void flips_and_cuts_are_survived(const SerdeStage& stage, unsigned seed) {
    std::mt19937 random(seed);
    const Bytes payload = gaussian(100'001, 1.0, seed);
    const Bytes good = encoded(stage, payload);
    Bytes target(payload.size());
    for (int round = 0; round < 400; ++round) {
        Bytes bad = good;
        const auto flips = random() % 4;
        for (unsigned flip = 0; flip < flips; ++flip) {
            const std::size_t where = round % 2 == 0 ? random() % 200 : random() % bad.size();
            bad[where] = static_cast<std::byte>(random());
        }
        if (random() % 2 == 0) bad.resize(random() % (bad.size() + 1));
        bad.shrink_to_fit();
        (void)stage.decode(bad, target, no_object(), {});  // a sanitizer sees what lies outside
    }
    for (const std::size_t size : {0UL, 1UL, 19UL, 64UL, 4096UL, 70'000UL}) {
        for (unsigned i = 0; i < 20; ++i) (void)stage.decode(noise(size, i), target, no_object(), {});
        CHECK(!decodes_to(stage, Bytes(size, std::byte{0xff}), payload));
    }
    Bytes longer = good;
    longer.push_back(std::byte{0});
    CHECK(stage.decode(longer, target, no_object(), {}) == SerdeFault::kCorrupt);
    longer.resize(good.size() - 1);
    CHECK(stage.decode(longer, target, no_object(), {}) == SerdeFault::kCorrupt);
    std::vector<std::byte> empty;
    CHECK(stage.decode(good, std::span<std::byte>(target).first(0), no_object(), {}) == SerdeFault::kCorrupt);
}

TEST_CASE(every_path_gives_back_what_it_got_and_the_same_bytes_as_the_others) {
    for (const Bytes& payload : payloads()) {
        const Bytes expected = encoded(*make_exponent_stage(0, *exponent_kernels("portable")), payload);
        for (const char* path : kPaths) {
            const ExponentKernels* const kernels = exponent_kernels(path);
            if (kernels == nullptr) continue;
            const auto stage = make_exponent_stage(0, *kernels);
            CHECK(encoded(*stage, payload) == expected);
            CHECK(decodes_to(*stage, expected, payload));
        }
    }
}

TEST_CASE(every_bit_pattern_survives_in_every_place) {
    Bytes payload(2 * 65536 * 2);
    for (std::size_t i = 0; i < 65536 * 2; ++i) {
        // Mostly one exponent, so that codes are used.
        const auto element = static_cast<std::uint16_t>(i % 2 == 0 ? 0x3f80 + i % 128 : i / 2);
        std::memcpy(payload.data() + 2 * i, &element, 2);
    }
    for (const char* path : kPaths) {
        const ExponentKernels* const kernels = exponent_kernels(path);
        if (kernels == nullptr) continue;
        const auto stage = make_exponent_stage(0, *kernels);
        CHECK(decodes_to(*stage, encoded(*stage, payload), payload));
    }
    for (const int level : {0, 1, 0, 3}) {
        const auto stage = make_zstd_stage(level, 0);
        CHECK(decodes_to(*stage, encoded(*stage, payload), payload));
    }
}

TEST_CASE(a_gaussian_shrinks_by_its_exponents) {
    const Bytes payload = gaussian(1 << 20, 1.0, 1);
    const std::size_t exponent = encoded(*make_exponent_stage(0.1), payload).size();
    const std::size_t zstd = encoded(*make_zstd_stage(0, 0.1), payload).size();
    CHECK(exponent < payload.size() * 71 / 100);
    CHECK(zstd < payload.size() * 67 / 100);
}

TEST_CASE(what_does_not_shrink_is_left) {
    std::vector<std::byte> parameters;
    for (const auto& stage : {make_exponent_stage(0.1), make_zstd_stage(1, 0.1)}) {
        const Bytes payloads[] = {noise(1 << 18, 3), gaussian(127, 1.0, 2), {}};
        for (const Bytes& payload : payloads) {
            Bytes target(stage->max_encoded_bytes(payload.size()));
            CHECK(!stage->encode(payload, target, no_object(), parameters));
        }
    }
}

TEST_CASE(hostile_exponent_payloads_stay_in_bounds) {
    for (const char* path : kPaths) {
        const ExponentKernels* const kernels = exponent_kernels(path);
        if (kernels != nullptr) flips_and_cuts_are_survived(*make_exponent_stage(0, *kernels), 11);
    }
}

TEST_CASE(hostile_zstd_payloads_stay_in_bounds) {
    for (const int level : {0, 1}) flips_and_cuts_are_survived(*make_zstd_stage(level, 0), 12);
}

TEST_CASE(anything_but_one_zstd_frame_of_the_format_is_corrupt) {
    const auto stage = make_zstd_stage(1, 0);
    const Bytes payload = gaussian(1 << 16, 1.0, 4);
    const Bytes good = encoded(*stage, payload);
    const std::size_t frame_at = sizeof(std::uint32_t) + payload.size() / 2;
    const auto with = [&](const Bytes& before, const Bytes& behind) {
        Bytes changed = good;
        changed.insert(changed.end(), behind.begin(), behind.end());
        changed.insert(changed.begin() + static_cast<std::ptrdiff_t>(frame_at), before.begin(), before.end());
        const auto word = static_cast<std::uint32_t>(changed.size() - frame_at);
        std::memcpy(changed.data(), &word, sizeof word);
        return changed;
    };
    const Bytes skipped = {std::byte{0x50}, std::byte{0x2a}, std::byte{0x4d}, std::byte{0x18}, {}, {}, {}, {}};
    CHECK(decodes_to(*stage, with({}, {}), payload));
    CHECK(!decodes_to(*stage, with(skipped, {}), payload));
    CHECK(!decodes_to(*stage, with({}, skipped), payload));
    Bytes old = good;  // that of version 0.7
    old[frame_at] = std::byte{0x27};
    CHECK(!decodes_to(*stage, old, payload));
}

TEST_CASE(settings_out_of_range_are_refused) {
    CHECK(refused([] { make_exponent_stage(1.0); }));
    CHECK(refused([] { make_exponent_stage(std::nan("")); }));
    CHECK(refused([] { make_zstd_stage(20, 0.1); }));
    CHECK(refused([] { make_zstd_stage(1, -0.1); }));
}

}  // namespace
