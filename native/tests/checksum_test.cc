#include "lmcache/checksum.h"

#include <cstring>
#include <string_view>
#include <vector>

#include "check.h"

using namespace lmcache;

namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
    return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// The definition, bit by bit.
std::uint32_t crc32c_by_bits(std::span<const std::byte> bytes) {
    std::uint32_t crc = ~0U;
    for (const std::byte byte : bytes) {
        crc ^= static_cast<std::uint8_t>(byte);
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78U : 0U);
    }
    return ~crc;
}

TEST_CASE(known_values) {
    CHECK(crc32c({}) == 0);
    CHECK(crc32c(bytes_of("123456789")) == 0xe3069283);  // the check value of CRC-32C
    const std::vector<std::byte> zeros(32);
    CHECK(crc32c(zeros) == 0x8a9136aa);  // RFC 3720, B.4
}

TEST_CASE(every_length) {
    std::vector<std::byte> bytes;
    for (std::size_t size = 0; size < 1400; ++size) {
        CHECK(crc32c(bytes) == crc32c_by_bits(bytes));
        bytes.push_back(static_cast<std::byte>(size * 37 + 11));
    }
}

TEST_CASE(steps_by_table) {
    const std::uint64_t word = 0x0123456789abcdef;
    const auto bytes = std::span(reinterpret_cast<const std::byte*>(&word), 8);
    CHECK(~crc32c_word_portable(~0U, word) == crc32c_by_bits(bytes));
    std::uint32_t crc = ~0U;
    for (const std::byte byte : bytes) crc = crc32c_byte_portable(crc, static_cast<std::uint8_t>(byte));
    CHECK(~crc == crc32c_by_bits(bytes));
}

TEST_CASE(empty_payload) {
    LaneChecksum sum;
    const PayloadChecksum zero{};
    CHECK(sum.finish() == zero);
}

}  // namespace
