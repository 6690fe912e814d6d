#include "lmcache/serde_chain.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "await_job.h"
#include "check.h"
#include "lmcache/exponent_stage.h"
#include "lmcache/serde_queue.h"
#include "lmcache/zstd_stage.h"

using namespace lmcache;

namespace {

using Bytes = std::vector<std::byte>;
using Bytes32 = std::array<std::byte, 32>;

Bytes32 filled(int value) {
    Bytes32 bytes;
    bytes.fill(static_cast<std::byte>(value));
    return bytes;
}

const Bytes32 kServed = filled(1), kStored = filled(2), kHash = filled(3);
constexpr std::size_t kPayload = 100'000;

// Writes the payload twice, or the reverse of it; `refuses` makes it leave everything, `key` must be the same again.
class ToyStage final : public SerdeStage {
public:
    bool refuses = false;
    int key = 7;

    std::size_t max_encoded_bytes(std::size_t source_bytes) const override { return 2 * source_bytes; }

    std::optional<std::size_t> encode(std::span<const std::byte> source, std::span<std::byte> destination,
                                      const SerdeObject& object, std::vector<std::byte>& parameters) const override {
        CHECK(object.chunk_hash[0] == kHash[0] && object.namespace_digest[0] == kServed[0]);
        CHECK(object.earlier_parameters.size() >= 32 && object.name_space.size() == 32);
        if (refuses) return std::nullopt;
        std::ranges::copy(source, destination.begin());
        std::ranges::reverse_copy(source, destination.begin() + static_cast<std::ptrdiff_t>(source.size()));
        parameters.assign(9, static_cast<std::byte>(key));
        return 2 * source.size();
    }

    SerdeFault decode(std::span<const std::byte> source, std::span<std::byte> destination, const SerdeObject& object,
                      std::span<const std::byte> parameters) const override {
        CHECK(object.chunk_hash[0] == kHash[0] && object.earlier_parameters.size() >= 32);
        if (parameters.size() != 9 || parameters[0] != static_cast<std::byte>(key)) return SerdeFault::kUnreadable;
        if (source.size() != 2 * destination.size()) return SerdeFault::kCorrupt;
        std::ranges::copy(source.first(destination.size()), destination.begin());
        return SerdeFault::kNone;
    }
};

using Stages = std::vector<std::shared_ptr<const SerdeStage>>;

// Keeps the upper half of every 16 bits. `offset` is added when it is decoded: another writer's setting.
class HalvingStage final : public SerdeStage {
public:
    explicit HalvingStage(int offset = 0) : offset_(offset) {}
    bool is_lossy() const override { return true; }
    std::size_t max_encoded_bytes(std::size_t source_bytes) const override { return source_bytes / 2; }
    std::optional<std::size_t> encode(std::span<const std::byte> source, std::span<std::byte> destination,
                                      const SerdeObject&, std::vector<std::byte>& parameters) const override {
        if (source.size() % 2 != 0) return std::nullopt;
        for (std::size_t i = 0; i < source.size() / 2; ++i) destination[i] = source[2 * i + 1];
        parameters.assign(3, std::byte{1});
        return source.size() / 2;
    }
    SerdeFault decode(std::span<const std::byte> source, std::span<std::byte> destination, const SerdeObject& object,
                      std::span<const std::byte> parameters) const override {
        if (parameters.size() != 3 || source.size() * 2 != destination.size()) return SerdeFault::kCorrupt;
        CHECK(object.earlier_parameters.size() >= 32);
        for (std::size_t i = 0; i < destination.size(); ++i)
            destination[i] =
                i % 2 == 0 ? std::byte{0} : static_cast<std::byte>(static_cast<int>(source[i / 2]) + offset_);
        return SerdeFault::kNone;
    }

private:
    const int offset_;
};

struct Case {
    explicit Case(Stages stages, const char* name = "toy", std::size_t payload_bytes = kPayload)
        : chain(name, std::move(stages)),
          templates{frame_template(kServed, kServed, 0, "", {}), frame_template(kStored, kStored, 0, name, {})},
          served(4096 + payload_bytes),
          stored(chain.max_frame_bytes(served.size()), std::byte{0xee}),
          loaded(round_up_4k(served.size()), std::byte{0xdd}) {
        for (std::size_t i = 0; i < payload_bytes; ++i)
            served[4096 + i] = static_cast<std::byte>(i % 2 == 0 ? i * 31 : 0x3f);
        frame_seal(served.data(), frame_template(kServed, kServed, payload_bytes, "", {}), kHash);
    }
    static std::size_t round_up_4k(std::size_t size) { return (size + 4095) / 4096 * 4096; }

    SerdeResult encode() { return chain.encode(served, stored, templates, kHash); }
    SerdeResult decode() { return chain.decode(stored, loaded, templates, kHash); }
    bool comes_back() {
        const SerdeResult result = encode();
        CHECK(result.fault == SerdeFault::kNone && result.frame_bytes % 4096 == 0);
        CHECK(result.frame_bytes <= stored.size());
        frame_bytes = result.frame_bytes;
        return decode().fault == SerdeFault::kNone && std::equal(served.begin(), served.end(), loaded.begin());
    }
    // Puts a header with right checksums in front of the stored payload.
    void reseal(FrameHeader header) { frame_seal(stored.data(), header, kHash); }
    FrameHeader header() const {
        FrameHeader copy;
        std::memcpy(&copy, stored.data(), sizeof copy);
        return copy;
    }

    SerdeChain chain;
    SerdeTemplates templates;
    Bytes served, stored, loaded;
    std::uint64_t frame_bytes = 0;
};

std::shared_ptr<ToyStage> toy(bool refuses = false, int key = 7) {
    auto stage = std::make_shared<ToyStage>();
    stage->refuses = refuses;
    stage->key = key;
    return stage;
}

TEST_CASE(what_goes_through_any_chain_comes_back_as_the_same_frame) {
    const auto exponent = make_exponent_stage(0.1), zstd = make_zstd_stage(1, 0.1);
    const std::vector<Stages> chains = {
        {exponent},
        {zstd},
        {toy()},
        {toy(true)},
        {toy(true), toy(true), toy(true)},
        {exponent, toy()},
        {toy(), zstd},
        {toy(true), exponent, toy(true)},
        {toy(), toy(true), toy(), toy(true), toy()},
    };
    for (const Stages& stages : chains) {
        for (const std::size_t payload_bytes : {1UL, 4096UL, kPayload, kPayload + 1})
            CHECK(Case(stages, "some", payload_bytes).comes_back());
    }
}

TEST_CASE(a_stored_frame_is_a_frame_of_its_own_key_with_zeros_behind_it) {
    Case test({make_exponent_stage(0.1)});
    CHECK(test.comes_back());
    CHECK(test.frame_bytes < test.served.size() * 8 / 10);
    CHECK(frame_verify(test.stored.data(), test.frame_bytes, kStored, kHash) == FrameFault::kNone);
    const FrameHeader header = test.header();
    CHECK(std::string(header.serde) == "toy");
    for (std::size_t at = 4096 + header.payload_bytes; at < test.frame_bytes; ++at)
        CHECK(test.stored[at] == std::byte{0});
}

TEST_CASE(every_flipped_byte_of_a_stored_frame_is_found) {
    Case test({make_exponent_stage(0.1), toy()});
    CHECK(test.comes_back());
    for (std::size_t at = 0; at < test.frame_bytes; at += at < 4096 ? 1 : 97) {
        if (at >= 4096 + test.header().payload_bytes) break;
        test.stored[at] ^= std::byte{0x10};
        const SerdeResult result = test.decode();
        CHECK(result.fault == SerdeFault::kCorrupt && result.frame_bytes == 0);
        CHECK(frame_verify(test.loaded.data(), test.loaded.size(), kServed, kHash) == FrameFault::kMagic);
        test.stored[at] ^= std::byte{0x10};
    }
    CHECK(test.decode().fault == SerdeFault::kNone);
}

TEST_CASE(what_a_lossy_stage_leaves_comes_back_and_nothing_else) {
    const auto halving = std::make_shared<HalvingStage>(), other = std::make_shared<HalvingStage>(1);
    const auto zstd = make_zstd_stage(0, 0);
    const std::vector<std::pair<Stages, Stages>> chains = {
        {{halving}, {other}},
        {{toy(), halving}, {toy(), other}},
        {{halving, toy()}, {other, toy()}},
        {{toy(true), halving, toy(), halving, zstd}, {toy(true), halving, toy(), other, zstd}},
    };
    for (const auto& [stages, of_others] : chains) {
        Case test(stages);
        CHECK(test.encode().fault == SerdeFault::kNone && test.decode().fault == SerdeFault::kNone);
        CHECK(frame_verify(test.loaded.data(), 4096 + kPayload, kServed, kHash) == FrameFault::kNone);
        const Bytes first = test.loaded;
        CHECK(!std::equal(test.served.begin(), test.served.end(), first.begin()));
        CHECK(test.decode().fault == SerdeFault::kNone && test.loaded == first);
        // The same names, but it decodes to something else: no hit.
        CHECK(SerdeChain("toy", of_others).decode(test.stored, test.loaded, test.templates, kHash).fault ==
              SerdeFault::kCorrupt);
        test.served[5000] ^= std::byte{1};  // nothing would find it later
        CHECK(test.encode().fault == SerdeFault::kCorrupt);
    }
    CHECK(Case({halving}, "toy", kPayload + 1).comes_back());  // which is left as it is
    Case cut({halving});
    CHECK(cut.encode().fault == SerdeFault::kNone);
    FrameHeader without = cut.header();
    const std::uint32_t parameter_bytes = 3;  // no checksum behind them
    std::memcpy(without.serde_params + 32 + 12, &parameter_bytes, sizeof parameter_bytes);
    without.serde_params_bytes -= 16;
    cut.reseal(without);
    CHECK(cut.decode().fault == SerdeFault::kCorrupt);
}

TEST_CASE(a_payload_that_changed_before_it_was_encoded_is_found_when_it_is_decoded) {
    for (const bool refuses : {false, true}) {
        Case test({toy(refuses)});
        test.served[5000] ^= std::byte{1};
        CHECK(test.encode().fault == SerdeFault::kNone);
        CHECK(test.decode().fault == SerdeFault::kCorrupt);
    }
}

TEST_CASE(frames_of_others_are_not_decoded) {
    Case test({toy()});
    CHECK(test.comes_back());
    const Case other({toy()}, "other");
    CHECK(other.chain.decode(test.stored, test.loaded, other.templates, kHash).fault == SerdeFault::kUnreadable);
    CHECK(test.chain.decode(test.stored, test.loaded, test.templates, filled(9)).fault == SerdeFault::kCorrupt);
    SerdeTemplates elsewhere = test.templates;
    elsewhere.stored = frame_template(kServed, kServed, 0, "toy", {});
    CHECK(test.chain.decode(test.stored, test.loaded, elsewhere, kHash).fault == SerdeFault::kCorrupt);
    Case with_another_key({toy(false, 8)});
    CHECK(with_another_key.comes_back());
    CHECK(test.chain.decode(with_another_key.stored, test.loaded, test.templates, kHash).fault ==
          SerdeFault::kUnreadable);
    Case longer({toy(), toy()});
    CHECK(longer.comes_back());
    CHECK(test.chain.decode(longer.stored, test.loaded, test.templates, kHash).fault == SerdeFault::kUnreadable);
}

TEST_CASE(hostile_parameters_with_right_checksums_stay_in_bounds) {
    std::mt19937 random(3);
    Case test({std::make_shared<HalvingStage>(), make_exponent_stage(0.1), toy()});
    CHECK(test.encode().fault == SerdeFault::kNone && test.decode().fault == SerdeFault::kNone);
    const FrameHeader good = test.header();
    for (int round = 0; round < 5000; ++round) {
        FrameHeader bad = good;
        const auto changes = 1 + random() % 3;
        for (unsigned i = 0; i < changes; ++i) bad.serde_params[random() % 128] = static_cast<std::uint8_t>(random());
        if (random() % 4 == 0) bad.serde_params_bytes = random() % 160;
        if (random() % 4 == 0) bad.payload_bytes = random() % (good.payload_bytes + 1);
        test.reseal(bad);
        (void)test.decode();
    }
    test.reseal(good);
    CHECK(test.decode().fault == SerdeFault::kNone);
}

TEST_CASE(memory_that_is_too_small_is_never_left) {
    Case test({toy()});
    CHECK(test.comes_back());
    for (const std::size_t size : {0UL, 4095UL, 4096UL, 8192UL, 4096 + kPayload - 1}) {
        Bytes small(size);
        CHECK(test.chain.decode(test.stored, small, test.templates, kHash).fault != SerdeFault::kNone);
        CHECK(test.chain.encode(test.served, small, test.templates, kHash).fault == SerdeFault::kFailed);
        const Bytes cut(test.stored.begin(), test.stored.begin() + static_cast<std::ptrdiff_t>(size));
        CHECK(test.chain.decode(cut, test.loaded, test.templates, kHash).fault == SerdeFault::kCorrupt);
    }
    const Bytes cut(test.served.begin(), test.served.begin() + 5000);
    CHECK(test.chain.encode(cut, test.stored, test.templates, kHash).fault == SerdeFault::kCorrupt);
}

TEST_CASE(chains_have_names_and_stages) {
    CHECK(refused([] { SerdeChain("", {toy()}); }));
    CHECK(refused([] { SerdeChain("none", {}); }));
    CHECK(refused([] { SerdeChain(std::string(33, 'x'), {toy()}); }));
    CHECK(refused([] { SerdeChain("nine", Stages(9, toy())); }));
}

TEST_CASE(a_queue_encodes_and_decodes_batches) {
    constexpr std::size_t kObjects = 40;
    std::vector<Case> cases;
    for (std::size_t i = 0; i < kObjects; ++i) cases.emplace_back(Stages{make_zstd_stage(1, 0.1)});
    SerdeQueue queue(std::make_shared<SerdeChain>("toy", Stages{make_zstd_stage(1, 0.1)}), 3);
    for (const bool encodes : {true, false}) {
        auto job = std::make_shared<SerdeJob>();
        job->encodes = encodes;
        job->templates = {cases[0].templates};
        for (Case& one : cases) {
            const auto& source = encodes ? one.served : one.stored;
            auto& destination = encodes ? one.stored : one.loaded;
            job->sources.push_back(reinterpret_cast<std::uint64_t>(source.data()));
            job->source_bytes.push_back(source.size());
            job->destinations.push_back(reinterpret_cast<std::uint64_t>(destination.data()));
            job->destination_bytes.push_back(destination.size());
            job->chunk_hashes.insert(job->chunk_hashes.end(), kHash.begin(), kHash.end());
            job->positions.push_back(0);
        }
        const SerdeResults results = wait_for(queue, queue.submit(job));
        CHECK(std::ranges::count(results.faults, 0) == kObjects);
        CHECK(std::ranges::count(results.frame_bytes, 0U) == 0);
    }
    for (const Case& one : cases) CHECK(std::equal(one.served.begin(), one.served.end(), one.loaded.begin()));
    auto uneven = std::make_shared<SerdeJob>();
    uneven->sources = {0};
    CHECK(refused([&] { queue.submit(uneven); }));
    auto beyond = std::make_shared<SerdeJob>();
    beyond->sources = beyond->source_bytes = beyond->destinations = beyond->destination_bytes = {0};
    beyond->chunk_hashes.resize(32);
    beyond->positions = {0};
    CHECK(refused([&] { queue.submit(beyond); }));
    CHECK(refused([&] { SerdeQueue(std::make_shared<SerdeChain>("toy", Stages{toy()}), 0); }));
    queue.close();
}

}  // namespace
