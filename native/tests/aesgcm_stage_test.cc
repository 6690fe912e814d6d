#include "lmcache/aesgcm_stage.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "check.h"
#include "lmcache/exponent_stage.h"
#include "lmcache/serde_chain.h"

using namespace lmcache;

namespace {

using Bytes = std::vector<std::byte>;
using Bytes32 = std::array<std::byte, 32>;

constexpr std::size_t kPayload = 70'001;
const std::string kName = "exponent,aesgcm";

Bytes32 filled(int value) {
    Bytes32 bytes;
    bytes.fill(static_cast<std::byte>(value));
    return bytes;
}

const Bytes32 kServed = filled(1), kStored = filled(2), kHash = filled(3);
const SerdeTemplates kTemplates{frame_template(kServed, kServed, 0, "", {}),
                                frame_template(kStored, kStored, 0, kName, {})};

std::shared_ptr<const ObjectCipher> cipher(int key) {
    MasterKey master;
    master.bytes.fill(static_cast<std::byte>(key));
    return std::make_shared<ObjectCipher>(std::vector{master}, 256);
}

SerdeChain chain(int key = 1) { return {kName, {make_exponent_stage(0.1), make_aesgcm_stage(cipher(key))}}; }

Bytes served() {
    Bytes frame(4096 + kPayload);
    for (std::size_t i = 0; i < kPayload; ++i) frame[4096 + i] = static_cast<std::byte>(i % 2 == 0 ? i * 31 : 0x3f);
    frame_seal(frame.data(), frame_template(kServed, kServed, kPayload, "", {}), kHash);
    return frame;
}

Bytes stored_by(const SerdeChain& encoder) {
    const Bytes source = served();
    Bytes stored(encoder.max_frame_bytes(source.size()));
    const SerdeResult result = encoder.encode(source, stored, kTemplates, kHash);
    CHECK(result.fault == SerdeFault::kNone);
    stored.resize(result.frame_bytes);
    return stored;
}

SerdeFault decoded(const SerdeChain& decoder, const Bytes& stored, const SerdeTemplates& templates = kTemplates,
                   const Bytes32& hash = kHash) {
    Bytes loaded(4096 + kPayload);
    const SerdeFault fault = decoder.decode(stored, loaded, templates, hash).fault;
    CHECK((loaded == served()) == (fault == SerdeFault::kNone));
    return fault;
}

FrameHeader header_of(const Bytes& stored) {
    FrameHeader header;
    std::memcpy(&header, stored.data(), sizeof header);
    return header;
}

}  // namespace

TEST_CASE(what_is_compressed_and_encrypted_comes_back) {
    const Bytes stored = stored_by(chain());
    CHECK(stored.size() < kPayload);
    CHECK(decoded(chain(), stored) == SerdeFault::kNone);
    CHECK(stored_by(chain()) != stored);
    CHECK(decoded(chain(2), stored) == SerdeFault::kUnreadable);
}

TEST_CASE(an_encrypted_object_is_opened_under_its_name_alone) {
    Bytes stored = stored_by(chain());
    const Bytes32 other_hash = filled(4);
    frame_seal(stored.data(), header_of(stored), other_hash);  // whoever can write there can make checksums right
    CHECK(decoded(chain(), stored, kTemplates, other_hash) == SerdeFault::kCorrupt);
    frame_seal(stored.data(), header_of(stored), kHash);
    CHECK(decoded(chain(), stored) == SerdeFault::kNone);
    const Bytes32 tenant = filled(5);
    const SerdeTemplates of_tenant{frame_template(tenant, tenant, 0, "", {}), kTemplates.stored};
    CHECK(decoded(chain(), stored, of_tenant) == SerdeFault::kCorrupt);
}

TEST_CASE(a_plain_payload_in_place_of_an_encrypted_one_is_corrupt) {
    // Both stages "left their input", and every checksum is right.
    const Bytes source = served();
    FrameHeader plain;
    std::memcpy(&plain, source.data(), sizeof plain);
    std::uint8_t parameters[64] = {};
    const std::uint32_t version = 1, stages = 2, unchanged = 1;
    const std::uint64_t size = kPayload;
    std::memcpy(parameters, &version, 4);
    std::memcpy(parameters + 4, &stages, 4);
    std::memcpy(parameters + 8, &size, 8);
    std::memcpy(parameters + 16, plain.payload_checksum, 16);
    for (const std::size_t record : {32, 48}) {
        std::memcpy(parameters + record, &size, 8);
        std::memcpy(parameters + record + 8, &unchanged, 4);
    }
    FrameHeader header = kTemplates.stored;
    header.payload_bytes = kPayload;
    header.serde_params_bytes = sizeof parameters;
    std::memcpy(header.serde_params, parameters, sizeof parameters);
    Bytes forged = source;
    frame_seal(forged.data(), header, kHash);
    CHECK(decoded(chain(), forged) == SerdeFault::kCorrupt);
    // The frame is well made otherwise: a chain that may leave what it gets takes it.
    const SerdeChain trusting(kName, {make_exponent_stage(0.1), make_exponent_stage(0.1)});
    CHECK(decoded(trusting, forged) == SerdeFault::kNone);
}

TEST_CASE(every_changed_parameter_of_an_encrypted_object_is_found) {
    const Bytes stored = stored_by(chain());
    const FrameHeader original = header_of(stored);
    for (std::size_t at = 0; at < original.serde_params_bytes; ++at) {
        FrameHeader header = original;
        header.serde_params[at] ^= 0x40;
        Bytes changed = stored;
        frame_seal(changed.data(), header, kHash);
        CHECK(decoded(chain(), changed) != SerdeFault::kNone);
    }
}

TEST_CASE(without_random_bits_nothing_is_stored) {
    MasterKey master;
    master.bytes.fill(std::byte{1});
    const auto broken = std::make_shared<ObjectCipher>(
        std::vector{master}, 256, +[](std::span<std::byte>) { throw CryptoError("none"); });
    const SerdeChain encoder(kName, {make_exponent_stage(0.1), make_aesgcm_stage(broken)});
    const Bytes source = served();
    Bytes stored(encoder.max_frame_bytes(source.size()));
    CHECK(refused<CryptoError>([&] { encoder.encode(source, stored, kTemplates, kHash); }));
}
