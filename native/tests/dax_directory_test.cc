#include "lmcache/dax_directory.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "check.h"

using namespace lmcache;

namespace {

const std::vector<std::byte> kDevice(kDaxIdBytes, std::byte{9});
constexpr std::uint64_t kStride = 8192;

template <typename T>
void put(std::byte* at, T value) {
    std::memcpy(at, &value, sizeof value);
}

std::vector<std::byte> entry(std::uint64_t slot, std::uint8_t name, std::uint64_t frame_bytes, std::uint64_t used) {
    std::vector<std::byte> bytes(kDaxEntryBytes), checked(96);
    std::memset(bytes.data(), name, kDaxNameBytes);
    put(bytes.data() + 64, frame_bytes);
    std::memcpy(checked.data(), bytes.data(), 72);
    std::memcpy(checked.data() + 72, kDevice.data(), kDaxIdBytes);
    put(checked.data() + 88, slot);
    put(bytes.data() + 72, crc32_zlib(checked));
    put(bytes.data() + 80, used);
    return bytes;
}

DaxDirectory read(const std::vector<std::byte>& entries) {
    return read_dax_directory(std::span<const std::byte, kDaxIdBytes>(kDevice), entries, kStride);
}

TEST_CASE(checksums) {
    const std::string_view digits = "123456789";
    CHECK(crc32_zlib(std::as_bytes(std::span(digits.data(), digits.size()))) == 0xCBF4'3926U);
    CHECK(crc32_zlib({}) == 0);
    const std::uint32_t half = crc32_zlib(std::as_bytes(std::span(digits.data(), 4)));
    CHECK(crc32_zlib(std::as_bytes(std::span(digits.data() + 4, 5)), half) == 0xCBF4'3926U);
}

TEST_CASE(directory) {
    std::vector<std::byte> all;
    const auto add = [&](const std::vector<std::byte>& bytes) { all.insert(all.end(), bytes.begin(), bytes.end()); };
    add(entry(0, 1, 4096, 50));
    add(std::vector<std::byte>(kDaxEntryBytes));
    add(entry(2, 2, 8192, 70));
    add(entry(99, 3, 4096, 80));           // of another slot
    add(entry(4, 4, kStride + 4096, 80));  // more than a slot holds
    add(entry(5, 5, 4096, 70));
    auto damaged = entry(6, 6, 4096, 90);
    damaged[20] ^= std::byte{1};
    add(damaged);
    const DaxDirectory found = read(all);
    CHECK((found.slots == std::vector<std::uint32_t>{2, 5, 0}));
    CHECK((found.frame_bytes == std::vector<std::uint64_t>{8192, 4096, 4096}));
    CHECK((found.free == std::vector<std::uint32_t>{1, 3, 4, 6}));
    CHECK(found.names.size() == 3 * kDaxNameBytes && found.names[0] == std::byte{2} &&
          found.names[2 * kDaxNameBytes] == std::byte{1});
    CHECK(read({all.begin() + kDaxEntryBytes, all.end()}).slots.empty());
    all.pop_back();
    CHECK(refused([&] { read(all); }));
}

TEST_CASE(entries_are_those_of_the_document) {
    std::vector<std::byte> names(2 * kDaxNameBytes, std::byte{1});
    std::fill(names.begin() + kDaxNameBytes, names.end(), std::byte{2});
    const std::vector<std::uint64_t> slots{10, 12}, sizes{4096, 8192};
    const std::span<const std::byte, kDaxIdBytes> device(kDevice);
    std::vector<std::byte> wanted = entry(10, 1, 4096, 5000);
    const std::vector<std::byte> second = entry(12, 2, 8192, 4000);
    wanted.insert(wanted.end(), second.begin(), second.end());
    CHECK(make_dax_entries(device, slots, names, sizes, 5000) == wanted);
    names.pop_back();
    CHECK(refused([&] { make_dax_entries(device, slots, names, sizes, 5000); }));
}

}  // namespace
