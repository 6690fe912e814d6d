#include "lmcache/frame.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"

using namespace lmcache;

namespace {

using Bytes32 = std::array<std::byte, 32>;

Bytes32 filled(int value) {
    Bytes32 bytes;
    bytes.fill(static_cast<std::byte>(value));
    return bytes;
}

const Bytes32 kDigest = filled(1);
const Bytes32 kHash = filled(2);
constexpr std::size_t kPayload = 1000;

std::vector<std::byte> sealed() {
    std::vector<std::byte> frame(kFrameHeaderBytes + kPayload);
    for (std::size_t i = 0; i < kPayload; ++i) frame[kFrameHeaderBytes + i] = static_cast<std::byte>(i * 31);
    frame_seal(frame.data(), frame_template(kHash, kDigest, kPayload, "fp8", kDigest), kHash);
    return frame;
}

FrameFault verdict(const std::vector<std::byte>& frame, const Bytes32& digest = kDigest, const Bytes32& hash = kHash) {
    return frame_verify(frame.data(), frame.size(), digest, hash);
}

TEST_CASE(every_flipped_byte_is_found) {
    std::vector<std::byte> frame = sealed();
    CHECK(verdict(frame) == FrameFault::kNone);
    for (std::size_t at = 0; at < frame.size(); ++at) {
        frame[at] ^= std::byte{0x10};
        const FrameFault fault = verdict(frame);
        frame[at] ^= std::byte{0x10};
        if (at < 8) {
            CHECK(fault == FrameFault::kMagic);
        } else if (at < 12) {
            CHECK(fault == FrameFault::kVersion);
        } else if (at < kFrameHeaderBytes) {
            CHECK(fault == FrameFault::kHeaderChecksum);
        } else {
            CHECK(fault == FrameFault::kPayloadChecksum);
        }
    }
    CHECK(verdict(frame) == FrameFault::kNone);
}

TEST_CASE(another_key_is_found) {
    const std::vector<std::byte> frame = sealed();
    CHECK(verdict(frame, filled(3)) == FrameFault::kNamespace);
    CHECK(verdict(frame, kDigest, filled(3)) == FrameFault::kChunkHash);
}

TEST_CASE(every_truncation_is_found) {
    const std::vector<std::byte> frame = sealed();
    for (std::size_t size = 0; size < frame.size(); ++size) {
        // A copy of its own, so that a sanitizer sees every read beyond it.
        const std::vector<std::byte> cut(frame.begin(), frame.begin() + static_cast<std::ptrdiff_t>(size));
        CHECK(verdict(cut) == FrameFault::kLength);
    }
}

TEST_CASE(lengths_beyond_limits_are_found_even_with_a_right_checksum) {
    std::vector<std::byte> frame = sealed();
    FrameHeader header;
    const auto reseal = [&] {
        header.header_checksum = crc32c({reinterpret_cast<const std::byte*>(&header), 4092});
        std::memcpy(frame.data(), &header, sizeof header);
        return verdict(frame);
    };
    const auto original = [&] { std::memcpy(&header, sealed().data(), sizeof header); };
    original();
    CHECK(reseal() == FrameFault::kNone);
    header.payload_bytes = ~std::uint64_t{0};
    CHECK(reseal() == FrameFault::kLength);
    header.payload_bytes = kPayload + 1;
    CHECK(reseal() == FrameFault::kLength);
    original();
    header.namespace_bytes = kMaxNamespaceBytes + 1;
    CHECK(reseal() == FrameFault::kLength);
    original();
    header.serde_params_bytes = kMaxSerdeParamsBytes + 1;
    CHECK(reseal() == FrameFault::kLength);
    original();
    header.header_bytes = 8192;
    CHECK(reseal() == FrameFault::kVersion);
}

TEST_CASE(invalidated_is_no_frame) {
    std::vector<std::byte> frame = sealed();
    FrameHeader before;
    std::memcpy(&before, frame.data(), sizeof before);
    CHECK(frame_header_unchanged(frame.data(), before));
    frame_invalidate(frame.data());
    CHECK(verdict(frame) == FrameFault::kMagic);
    CHECK(!frame_header_unchanged(frame.data(), before));
}

TEST_CASE(frames_travel_in_parts) {
    const std::vector<std::byte> original = sealed();
    std::vector<std::byte> taken(original.size());
    std::vector<std::byte> put = sealed();
    const std::size_t cuts[] = {0, kFrameHeaderBytes, kFrameHeaderBytes + 1, original.size()};
    for (std::size_t i = 0; i + 1 < std::size(cuts); ++i) {
        const std::size_t size = cuts[i + 1] - cuts[i];
        const std::span<std::byte> part = std::span(taken).subspan(cuts[i], size);
        CHECK(frame_read_part(original.data(), original.size(), cuts[i], part, kDigest, kHash) == FrameFault::kNone);
        frame_write_part(put.data(), cuts[i], part);
    }
    CHECK(taken == original && put == original);
    const std::span<std::byte> all(taken);
    const auto read = [&](std::uint64_t available, std::uint64_t offset, std::span<std::byte> part) {
        return frame_read_part(original.data(), available, offset, part, kDigest, kHash);
    };
    CHECK(read(original.size(), 1, all) == FrameFault::kLength);
    CHECK(read(original.size(), ~0ull, all.first(1)) == FrameFault::kLength);
    CHECK(read(original.size() - 1, 0, all.first(1)) == FrameFault::kLength);
    CHECK(read(kFrameHeaderBytes - 1, 0, all.first(1)) == FrameFault::kLength);
    CHECK(frame_read_part(original.data(), original.size(), 0, all, kHash, kHash) == FrameFault::kNamespace);
    CHECK(frame_read_part(original.data(), original.size(), 0, all, kDigest, kDigest) == FrameFault::kChunkHash);
    frame_write_part(put.data(), 0, std::span(original).first(4));
    CHECK(verdict(put) == FrameFault::kMagic);  // what it was is gone with the first part
}

TEST_CASE(templates_keep_their_limits) {
    const std::vector<std::byte> long_name(kMaxNamespaceBytes + 1);
    const std::vector<std::byte> long_params(kMaxSerdeParamsBytes + 1);
    const FrameHeader header = frame_template(std::span(long_name).first(kMaxNamespaceBytes), kDigest, kMaxObjectBytes,
                                              std::string(32, 's'), std::span(long_params).first(kMaxSerdeParamsBytes));
    CHECK(header.namespace_bytes == kMaxNamespaceBytes && header.serde[31] == 's');
    CHECK(refused([&] { frame_template(long_name, kDigest, 1, "", {}); }));
    CHECK(refused([&] { frame_template({}, std::span(kDigest).first(31), 1, "", {}); }));
    CHECK(refused([&] { frame_template({}, kDigest, kMaxObjectBytes + 1, "", {}); }));
    CHECK(refused([&] { frame_template({}, kDigest, 1, std::string(33, 's'), {}); }));
    CHECK(refused([&] { frame_template({}, kDigest, 1, "caf\xc3\xa9", {}); }));
    CHECK(refused([&] { frame_template({}, kDigest, 1, "", long_params); }));
    CHECK(refused([&] { frame_template_from_bytes(long_name); }));
    CHECK(refused([&] { frame_template_from_bytes(std::vector<std::byte>(4096)); }));
}

TEST_CASE(every_fault_has_its_own_name) {
    CHECK(std::string(frame_fault_name(FrameFault::kNone)).empty());
    std::vector<std::string> names;
    for (int fault = 1; fault <= static_cast<int>(FrameFault::kPayloadChecksum); ++fault) {
        names.emplace_back(frame_fault_name(static_cast<FrameFault>(fault)));
    }
    CHECK((names == std::vector<std::string>{"magic", "version", "header checksum", "namespace", "chunk hash", "length",
                                             "payload checksum"}));
}

}  // namespace
