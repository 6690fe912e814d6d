#include "lmcache/dax_directory.h"

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

DaxDirectory read(const std::vector<std::byte>& entries, std::uint64_t first = 0) {
    return read_dax_directory(std::span<const std::byte, kDaxIdBytes>(kDevice), first, entries, kStride);
}

void checksums() {
    const std::string_view digits = "123456789";
    CHECK(crc32_zlib(std::as_bytes(std::span(digits.data(), digits.size()))) == 0xCBF4'3926U);
    CHECK(crc32_zlib({}) == 0);
    const std::uint32_t half = crc32_zlib(std::as_bytes(std::span(digits.data(), 4)));
    CHECK(crc32_zlib(std::as_bytes(std::span(digits.data() + 4, 5)), half) == 0xCBF4'3926U);
}

void directory() {
    std::vector<std::byte> all;
    const auto add = [&](const std::vector<std::byte>& bytes) { all.insert(all.end(), bytes.begin(), bytes.end()); };
    add(entry(10, 1, 4096, 50));
    add(std::vector<std::byte>(kDaxEntryBytes));
    add(entry(12, 2, 8192, 70));
    add(entry(99, 3, 4096, 80));            // of another slot
    add(entry(14, 4, kStride + 4096, 80));  // more than a slot holds
    add(entry(15, 5, 4096, 70));
    auto damaged = entry(16, 6, 4096, 90);
    damaged[20] ^= std::byte{1};
    add(damaged);
    const DaxDirectory found = read(all, 10);
    CHECK((found.slots == std::vector<std::uint32_t>{12, 15, 10}));
    CHECK((found.frame_bytes == std::vector<std::uint64_t>{8192, 4096, 4096}));
    CHECK((found.free == std::vector<std::uint32_t>{11, 13, 14, 16}));
    CHECK(found.names.size() == 3 * kDaxNameBytes && found.names[0] == std::byte{2} &&
          found.names[2 * kDaxNameBytes] == std::byte{1});
    CHECK(read(all, 11).slots.empty());
    all.pop_back();
    CHECK(refused([&] { read(all, 10); }));
}

}  // namespace

int main() {
    checksums();
    directory();
    return 0;
}
