#include "lmcache/dax_directory.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace lmcache {
namespace {

struct Entry {
    std::byte name[kDaxNameBytes];
    std::uint64_t frame_bytes;
    std::uint32_t checksum;
    std::uint32_t zero;
    std::uint64_t used;
    std::byte unused[40];
};
static_assert(sizeof(Entry) == kDaxEntryBytes);

// What the checksum covers.
struct Checked {
    std::byte name[kDaxNameBytes];
    std::uint64_t frame_bytes;
    std::byte device[kDaxIdBytes];
    std::uint64_t slot;
};
static_assert(sizeof(Checked) == 96);

// Slicing by eight: table k gives what a byte contributes when k more bytes follow it.
using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables make_tables() {
    Tables tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0xEDB8'8320U & (0U - (crc & 1U)));
        tables[0][byte] = crc;
    }
    for (std::size_t k = 1; k < tables.size(); ++k)
        for (std::size_t byte = 0; byte < 256; ++byte)
            tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 0xFF];
    return tables;
}

constexpr Tables kTables = make_tables();

std::uint32_t checksum_of(const Entry& entry, std::span<const std::byte, kDaxIdBytes> device, std::uint64_t slot) {
    Checked checked{};
    std::memcpy(checked.name, entry.name, kDaxNameBytes);
    checked.frame_bytes = entry.frame_bytes;
    std::memcpy(checked.device, device.data(), kDaxIdBytes);
    checked.slot = slot;
    return crc32_zlib(std::as_bytes(std::span(&checked, 1)));
}

}  // namespace

std::uint32_t crc32_zlib(std::span<const std::byte> bytes, std::uint32_t crc) {
    crc = ~crc;
    const std::byte* at = bytes.data();
    std::size_t left = bytes.size();
    for (; left >= 8; left -= 8, at += 8) {
        std::uint64_t word;
        std::memcpy(&word, at, sizeof word);
        word ^= crc;
        crc = 0;
        for (std::size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][word >> (8 * k) & 0xFF];
    }
    for (; left != 0; --left, ++at) crc = (crc >> 8) ^ kTables[0][(crc ^ static_cast<std::uint32_t>(*at)) & 0xFF];
    return ~crc;
}

std::vector<std::byte> make_dax_entries(std::span<const std::byte, kDaxIdBytes> device,
                                        std::span<const std::uint64_t> slots, std::span<const std::byte> names,
                                        std::span<const std::uint64_t> frame_bytes, std::uint64_t used_ns) {
    const std::size_t count = slots.size();
    if (names.size() != count * kDaxNameBytes || frame_bytes.size() != count)
        throw std::invalid_argument("there must be a name of 64 bytes and a size for each slot");
    std::vector<std::byte> entries(count * kDaxEntryBytes);
    for (std::size_t i = 0; i < count; ++i) {
        Entry entry{};
        std::memcpy(entry.name, names.data() + i * kDaxNameBytes, kDaxNameBytes);
        entry.frame_bytes = frame_bytes[i];
        entry.checksum = checksum_of(entry, device, slots[i]);
        entry.used = used_ns - 1000 * i;
        std::memcpy(entries.data() + i * kDaxEntryBytes, &entry, sizeof entry);
    }
    return entries;
}

DaxDirectory read_dax_directory(std::span<const std::byte, kDaxIdBytes> device, std::span<const std::byte> entries,
                                std::uint64_t stride) {
    if (entries.size() % kDaxEntryBytes != 0) throw std::invalid_argument("entries must be whole ones of 128 bytes");
    const std::size_t count = entries.size() / kDaxEntryBytes;
    struct Found {
        std::uint64_t used;
        std::size_t index;
    };
    std::vector<Found> found;
    DaxDirectory result;
    const auto entry_at = [&](std::size_t index) {
        Entry entry;
        std::memcpy(&entry, entries.data() + index * kDaxEntryBytes, sizeof entry);
        return entry;
    };
    for (std::size_t i = 0; i < count; ++i) {
        const Entry entry = entry_at(i);
        const bool valid =
            entry.frame_bytes != 0 && entry.frame_bytes <= stride && entry.checksum == checksum_of(entry, device, i);
        if (valid)
            found.push_back({entry.used, i});
        else
            result.free.push_back(static_cast<std::uint32_t>(i));
    }
    std::stable_sort(found.begin(), found.end(), [](const Found& a, const Found& b) { return a.used > b.used; });
    result.names.resize(found.size() * kDaxNameBytes);
    for (std::size_t i = 0; i < found.size(); ++i) {
        const Entry entry = entry_at(found[i].index);
        result.slots.push_back(static_cast<std::uint32_t>(found[i].index));
        std::memcpy(result.names.data() + i * kDaxNameBytes, entry.name, kDaxNameBytes);
        result.frame_bytes.push_back(entry.frame_bytes);
    }
    return result;
}

}  // namespace lmcache
