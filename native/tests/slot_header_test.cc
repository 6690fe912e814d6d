#include "lmcache/slot_header.h"

#include <cstring>
#include <string>
#include <vector>

#include "check.h"

using namespace lmcache;

namespace {

constexpr std::uint64_t kPayloadBytes = 5000;
constexpr std::uint64_t kFrameBytes = 12288;

std::vector<std::byte> filled(std::size_t size, int seed) {
    std::vector<std::byte> bytes(size);
    for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 31 + static_cast<std::size_t>(seed));
    return bytes;
}

struct Example {
    Example() : frame(filled(kFrameBytes, 1)), slot(kFrameBytes) {
        const auto name_space = filled(40, 3);
        frame_seal(frame.data(), frame_template(name_space, digest, kPayloadBytes, "", {}), hash_span());
    }
    std::span<const std::byte, kDigestBytes> digest_span() const {
        return std::span<const std::byte, kDigestBytes>(digest);
    }
    std::span<const std::byte, kChunkHashBytes> hash_span() const {
        return std::span<const std::byte, kChunkHashBytes>(hash);
    }
    std::string seal() {
        std::vector<std::byte> head(kFrameHeaderBytes);
        const auto verdict =
            slot_header_seal(frame.data(), frame.size(), head.data(), place, digest_span(), hash_span());
        slot = frame;
        std::memcpy(slot.data(), head.data(), head.size());
        return slot_fault_name(verdict);
    }
    std::string open(std::uint64_t available = kFrameBytes) {
        return slot_fault_name(slot_header_open(slot.data(), available, place, digest_span(), hash_span()));
    }

    std::vector<std::byte> digest = filled(kDigestBytes, 7), hash = filled(kChunkHashBytes, 9);
    std::vector<std::byte> frame, slot;
    SlotPlace place{{1, 2, 3}, 77, 1234567890123};
};

TEST_CASE(round_trip) {
    Example example;
    CHECK(example.seal().empty());
    CHECK(example.slot != example.frame);
    CHECK(frame_verify(example.slot.data(), kFrameBytes, example.digest_span(), example.hash_span()) ==
          FrameFault::kMagic);  // a slot that was not opened is no frame
    CHECK(example.open().empty());
    CHECK(example.slot == example.frame);
    CHECK(example.open() == "magic");
}

TEST_CASE(parse) {
    Example example;
    CHECK(example.seal().empty());
    FrameHeader header;
    std::memcpy(&header, example.slot.data(), sizeof header);
    SlotPlace place{};
    CHECK(slot_header_parse(header, place).fault == SlotFault::kNone);
    CHECK(std::memcmp(&place, &example.place, sizeof place) == 0);
    CHECK(std::memcmp(&header, example.frame.data(), sizeof header) == 0);
}

template <typename Change>
std::string fault_after(Change change) {
    Example example;
    CHECK(example.seal().empty());
    const auto before = example.slot;
    change(example);
    const auto changed = example.slot;
    const std::string fault = example.open();
    CHECK(fault.empty() || example.slot == changed);
    return fault;
}

TEST_CASE(refusals) {
    CHECK(fault_after([](Example& e) { e.place.slot = 78; }) == "slot");
    CHECK(fault_after([](Example& e) { e.place.generation += 1; }) == "generation");
    CHECK(fault_after([](Example& e) { e.place.device[0] = 9; }) == "device");
    CHECK(fault_after([](Example& e) { e.hash[5] ^= std::byte{1}; }) == "chunk hash");
    CHECK(fault_after([](Example& e) { e.digest[5] ^= std::byte{1}; }) == "namespace");
    CHECK(fault_after([](Example& e) { e.slot[0] = std::byte{0}; }) == "magic");
    Example example;
    CHECK(example.seal().empty());
    CHECK(example.open(kFrameHeaderBytes + kPayloadBytes - 1) == "length");
    CHECK(example.open(100) == "length");
    CHECK(example.open(kFrameHeaderBytes + kPayloadBytes).empty());
}

TEST_CASE(every_flipped_bit_is_noticed) {
    for (std::size_t i = 0; i < kFrameHeaderBytes * 8; i += 29) {
        const std::string fault = fault_after([&](Example& e) { e.slot[i / 8] ^= std::byte(1U << (i % 8)); });
        CHECK(!fault.empty());
    }
}

TEST_CASE(bad_frames_are_not_sealed) {
    Example example;
    example.frame[200] = std::byte{1};
    CHECK(example.seal() == "header checksum");
    Example other;
    other.hash[0] ^= std::byte{1};
    CHECK(other.seal() == "chunk hash");
    Example reserved;  // valid, but with something where the place goes
    FrameHeader header;
    std::memcpy(&header, reserved.frame.data(), sizeof header);
    header.reserved[111] = 1;
    header.header_checksum =
        crc32c({reinterpret_cast<const std::byte*>(&header), offsetof(FrameHeader, header_checksum)});
    std::memcpy(reserved.frame.data(), &header, sizeof header);
    CHECK(reserved.seal() == "version");
}

}  // namespace
