#include "lmcache/cachegen_stage.h"

#include <bit>
#include <cmath>
#include <random>

#include "check.h"

using namespace lmcache;

namespace {

using Bytes = std::vector<std::byte>;
using Elements = std::vector<std::uint16_t>;

float value_of(std::uint16_t element) { return std::bit_cast<float>(static_cast<std::uint32_t>(element) << 16); }
std::uint16_t bfloat(float value) { return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16); }

Elements gaussian(std::size_t size, double factor = 3) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, 1);
    Elements elements(size);
    for (auto& element : elements) element = bfloat(static_cast<float>(normal(random) * factor));
    return elements;
}

SerdeObject object() {
    static constexpr std::byte kNothing[32] = {};
    return {{}, std::span(kNothing), std::span(kNothing), {}};
}

Bytes encoded(const SerdeStage& stage, std::span<const std::byte> source) {
    Bytes made(stage.max_encoded_bytes(source.size()), std::byte{0xee});
    std::vector<std::byte> parameters;
    const auto size = stage.encode(source, made, object(), parameters);
    CHECK(size && *size <= made.size() && parameters.empty());
    made.resize(*size);
    return made;
}

Elements round_trip(const SerdeStage& stage, const Elements& elements) {
    const Bytes made = encoded(stage, std::as_bytes(std::span(elements)));
    Elements found(elements.size(), 0x7fff);
    CHECK(stage.decode(made, std::as_writable_bytes(std::span(found)), object(), {}) == SerdeFault::kNone);
    return found;
}

}  // namespace

TEST_CASE(the_error_of_cachegen_is_half_a_step_of_the_largest) {
    for (const unsigned bins : {16U, 32U}) {
        const auto stage = make_cachegen_stage(bins);
        for (const double factor : {1.0, 1e-25, 1e30}) {
            for (const std::size_t groups : {1UL, 255UL, 256UL, 700UL}) {
                const Elements elements = gaussian(groups * kCachegenGroupElements, factor);
                const Elements found = round_trip(*stage, elements);
                for (std::size_t group = 0; group < elements.size(); group += kCachegenGroupElements) {
                    double largest = 0;
                    for (std::size_t i = group; i < group + kCachegenGroupElements; ++i)
                        largest = std::max<double>(largest, std::abs(value_of(elements[i])));
                    const double half = largest / (bins / 2 - 1) / 2;
                    for (std::size_t i = group; i < group + kCachegenGroupElements; ++i) {
                        const double value = value_of(elements[i]), near = value_of(found[i]);
                        CHECK(std::abs(near - value) <= half * 1.0001 + std::abs(near) * 0x1p-8);
                        if (std::abs(value) == largest) CHECK(found[i] == elements[i]);
                    }
                }
                CHECK(round_trip(*stage, found) == found);  // what is encoded again comes back as it is
            }
        }
    }
}

TEST_CASE(cachegen_needs_about_as_many_bits_as_entropy_says) {
    const Elements elements = gaussian(1 << 20);
    const std::size_t raw = 2 * elements.size();
    CHECK(encoded(*make_cachegen_stage(16), std::as_bytes(std::span(elements))).size() < raw * 22 / 100);
    CHECK(encoded(*make_cachegen_stage(32), std::as_bytes(std::span(elements))).size() < raw * 29 / 100);
}

TEST_CASE(extremes_of_cachegen) {
    for (const unsigned bins : {16U, 32U}) {
        const auto stage = make_cachegen_stage(bins);
        for (const float extreme : {0.0F, -0.0F, 0x1p-133F, 0x1p-110F, 0x1p-99F, -1.0F, 0x1.fep127F}) {
            Elements elements(300 * kCachegenGroupElements, bfloat(extreme));
            elements[7] = bfloat(-extreme);
            const Elements found = round_trip(*stage, elements);
            for (std::size_t i = 0; i < elements.size(); ++i)
                CHECK(std::abs(value_of(found[i]) - value_of(elements[i])) <= 0x1p-100);
        }
        // Every symbol is as frequent, or one is very rare.
        Elements steps(256 * kCachegenGroupElements);
        for (std::size_t i = 0; i < steps.size(); ++i)
            steps[i] = bfloat(static_cast<float>(static_cast<int>(i % (bins - 1)) - static_cast<int>(bins / 2 - 1)));
        CHECK(round_trip(*stage, steps) == steps);
        Elements rare(256 * kCachegenGroupElements, 0);
        rare[65000] = bfloat(1.0F);
        CHECK(round_trip(*stage, rare) == rare);
        Bytes made(stage->max_encoded_bytes(2 * steps.size()));
        std::vector<std::byte> parameters;
        for (const auto infinite : std::initializer_list<std::uint16_t>{0x7f80, 0xff80, 0x7fc1}) {
            steps.back() = infinite;
            CHECK(!stage->encode(std::as_bytes(std::span(steps)), made, object(), parameters));
        }
    }
    CHECK(refused([] { make_cachegen_stage(8); }));
}

TEST_CASE(a_tail_is_kept_and_hostile_bytes_stay_in_bounds) {
    const auto stage = make_cachegen_stage(32);
    std::mt19937 random(7);
    const Elements numbers = gaussian(300 * kCachegenGroupElements);
    for (const std::size_t size : {0UL, 1UL, 511UL, 512UL, 513UL, 5001UL, 131072UL + 1537UL}) {
        const auto source = std::as_bytes(std::span(numbers)).first(size);
        const Bytes made = encoded(*stage, source);
        Bytes found(size);
        CHECK(stage->decode(made, found, object(), {}) == SerdeFault::kNone);
        const auto tail = static_cast<std::ptrdiff_t>(size % 512);
        CHECK(std::equal(source.end() - tail, source.end(), found.end() - tail));
        if (size < 512) continue;
        for (int round = 0; round < 300; ++round) {
            Bytes hostile = made;
            const auto changes = 1 + random() % 4;
            for (unsigned i = 0; i < changes; ++i)
                hostile[random() % std::min<std::size_t>(hostile.size(), round % 2 ? 1200 : hostile.size())] =
                    static_cast<std::byte>(random());
            if (round % 3 == 0) hostile.resize(random() % (hostile.size() + 1));
            (void)stage->decode(hostile, found, object(), {});
        }
        Bytes cut = made;
        cut.pop_back();
        CHECK(stage->decode(cut, found, object(), {}) == SerdeFault::kCorrupt);
        Bytes longer = made;
        longer.push_back(std::byte{0});
        CHECK(stage->decode(longer, found, object(), {}) == SerdeFault::kCorrupt || tail != 0);
        CHECK(stage->decode(made, found, object(), made) == SerdeFault::kCorrupt);
    }
}
