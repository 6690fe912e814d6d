#include "lmcache/fp8_stage.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "check.h"

using namespace lmcache;

namespace {

using Bytes = std::vector<std::byte>;
using Elements = std::vector<std::uint16_t>;

constexpr const char* kPaths[] = {"portable", "avx2", "avx512"};
constexpr float kInfinity = std::numeric_limits<float>::infinity();

float value_of(std::uint16_t element) { return std::bit_cast<float>(static_cast<std::uint32_t>(element) << 16); }
std::uint16_t bfloat(float value) { return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16); }

Elements gaussian(std::size_t size, unsigned seed = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, 3);
    Elements elements(size);
    for (auto& element : elements) element = bfloat(normal(random));
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
    CHECK(size == made.size() && parameters.empty());
    return made;
}

Elements round_trip(Fp8Format format, const Elements& elements) {
    const auto stage = make_fp8_stage(format);
    const Bytes made = encoded(*stage, std::as_bytes(std::span(elements)));
    Elements found(elements.size());
    CHECK(stage->decode(made, std::as_writable_bytes(std::span(found)), object(), {}) == SerdeFault::kNone);
    return found;
}

// Half a unit of the last place of the code, plus what scales and bfloat16 round.
double bound(Fp8Format format, double value, double largest) {
    const bool is_e4m3 = format == Fp8Format::kE4m3;
    const double normal = std::abs(value) * (is_e4m3 ? 0x1p-4 : 0x1p-3);
    const double small = largest / (is_e4m3 ? 448 : 57344) * (is_e4m3 ? 0x1p-10 : 0x1p-17);
    return std::max(normal, small) * 1.001 + std::abs(value) * 0x1p-8;
}

}  // namespace

TEST_CASE(the_error_of_fp8_is_bounded) {
    for (const Fp8Format format : {Fp8Format::kE4m3, Fp8Format::kE5m2}) {
        for (const float factor : {1.0F, 1e-9F, 1e20F}) {
            Elements elements = gaussian(64 * kFp8GroupElements);
            for (auto& element : elements) element = bfloat(value_of(element) * factor);
            const Elements found = round_trip(format, elements);
            for (std::size_t group = 0; group < elements.size(); group += kFp8GroupElements) {
                double largest = 0;
                for (std::size_t i = group; i < group + kFp8GroupElements; ++i)
                    largest = std::max<double>(largest, std::abs(value_of(elements[i])));
                for (std::size_t i = group; i < group + kFp8GroupElements; ++i) {
                    const double value = value_of(elements[i]);
                    CHECK(std::abs(value_of(found[i]) - value) <= bound(format, value, largest));
                    CHECK(std::signbit(value_of(found[i])) == std::signbit(value));
                    if (std::abs(value) == largest) CHECK(found[i] == elements[i]);
                }
            }
        }
    }
}

TEST_CASE(every_path_writes_and_reads_the_same_bytes) {
    Elements elements(65536 + 3 * kFp8GroupElements);  // every bit pattern, then a usual group
    for (std::size_t i = 0; i < 65536; ++i) elements[i] = static_cast<std::uint16_t>(i * 40503);
    const Elements usual = gaussian(3 * kFp8GroupElements);
    std::copy(usual.begin(), usual.end(), elements.begin() + 65536);
    for (const Fp8Format format : {Fp8Format::kE4m3, Fp8Format::kE5m2}) {
        const auto portable = make_fp8_stage(format, "portable");
        const Bytes expected = encoded(*portable, std::as_bytes(std::span(elements)));
        Bytes any = expected;  // every code under odd scales
        for (std::size_t i = 0; i < any.size(); ++i) any[i] = static_cast<std::byte>(i * 167);
        Elements from_any(elements.size());
        CHECK(portable->decode(any, std::as_writable_bytes(std::span(from_any)), object(), {}) == SerdeFault::kNone);
        for (const char* const path : kPaths) {
            if (!runs_fp8_path(path)) continue;
            const auto stage = make_fp8_stage(format, path);
            CHECK(encoded(*stage, std::as_bytes(std::span(elements))) == expected);
            Elements found(elements.size());
            CHECK(stage->decode(any, std::as_writable_bytes(std::span(found)), object(), {}) == SerdeFault::kNone);
            CHECK(found == from_any);
        }
    }
}

TEST_CASE(infinities_saturate_and_nan_stays) {
    for (const Fp8Format format : {Fp8Format::kE4m3, Fp8Format::kE5m2}) {
        Elements elements(2 * kFp8GroupElements, bfloat(0.5F));
        elements[3] = bfloat(-20.0F);
        elements[4] = bfloat(kInfinity);
        elements[5] = bfloat(-kInfinity);
        elements[6] = 0x7f81;  // signalling
        elements[7] = 0xffff;
        elements[8] = 0x8000;  // -0
        std::fill(elements.begin() + kFp8GroupElements, elements.end(), std::uint16_t{0});
        const Elements found = round_trip(format, elements);
        CHECK(value_of(found[3]) == -20 && value_of(found[4]) == 20 && value_of(found[5]) == -20);
        CHECK(std::isnan(value_of(found[6])) && std::isnan(value_of(found[7])) && found[8] == 0x8000);
        for (std::size_t i = kFp8GroupElements; i < found.size(); ++i) CHECK(found[i] == 0);
        // The ends of the range.
        for (const auto extreme : std::initializer_list<std::uint16_t>{0x7f7f, 0x0080, 0x0001}) {
            const Elements all(kFp8GroupElements, extreme);
            const Elements back = round_trip(format, all);
            CHECK(std::isfinite(value_of(back[0])) && std::abs(value_of(back[0]) - value_of(extreme)) <= 0x1p-100);
        }
    }
}

TEST_CASE(what_is_encoded_once_is_encoded_the_same_again) {
    for (const Fp8Format format : {Fp8Format::kE4m3, Fp8Format::kE5m2}) {
        const Elements once = round_trip(format, gaussian(8 * kFp8GroupElements));
        CHECK(round_trip(format, once) == once);
    }
}

TEST_CASE(a_tail_is_kept_and_sizes_that_do_not_fit_are_corrupt) {
    const auto stage = make_fp8_stage(Fp8Format::kE4m3);
    std::mt19937 random(7);
    for (const std::size_t size : {0UL, 1UL, 511UL, 512UL, 513UL, 1023UL, 5000UL}) {
        Bytes source(size);
        for (auto& value : source) value = static_cast<std::byte>(random());
        const Bytes made = encoded(*stage, source);
        Bytes found(size);
        CHECK(stage->decode(made, found, object(), {}) == SerdeFault::kNone);
        CHECK(std::equal(source.end() - static_cast<std::ptrdiff_t>(size % 512), source.end(),
                         found.end() - static_cast<std::ptrdiff_t>(size % 512)));
        for (int round = 0; round < 200; ++round) {
            const Bytes hostile(random() % 6000, static_cast<std::byte>(random()));
            const SerdeFault expected = hostile.size() == made.size() ? SerdeFault::kNone : SerdeFault::kCorrupt;
            CHECK(stage->decode(hostile, found, object(), {}) == expected);
        }
        CHECK(stage->decode(made, found, object(), source.size() > 1 ? source : made) != SerdeFault::kNone ||
              made.empty());
    }
    CHECK(refused([] { make_fp8_stage(Fp8Format::kE4m3, "mmx"); }));
}
