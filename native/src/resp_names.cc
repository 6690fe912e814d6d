#include "lmcache/resp_names.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "lmcache/checksum.h"
#include "lmcache/object_path.h"

namespace lmcache {
namespace {

constexpr std::string_view kObjects = "/v1/", kParts = "/v1-parts/";
constexpr char kManifestMagic[8] = {'L', 'M', 'C', 'P', 'A', 'R', 'T', 'S'};
constexpr std::uint32_t kManifestVersion = 1;

// Little-endian, as it lies in the backend.
struct ManifestImage {
    char magic[8];
    std::uint32_t version;
    std::uint32_t parts;
    std::uint64_t part_bytes;
    std::uint64_t total_bytes;
    std::byte write_id[RespManifest::kWriteIdBytes];
    std::byte reserved[12];  // zero
    std::uint32_t checksum;  // CRC-32C of all bytes before it
};
static_assert(sizeof(ManifestImage) == RespManifest::kBytes);

std::uint32_t checksum_of(const ManifestImage& image) {
    return crc32c(std::as_bytes(std::span(&image, 1)).first(offsetof(ManifestImage, checksum)));
}

int hex_value(char digit) {
    if (digit >= '0' && digit <= '9') return digit - '0';
    if (digit >= 'a' && digit <= 'f') return digit - 'a' + 10;
    return -1;
}

bool parse_hex(std::string_view text, std::span<std::byte> bytes) {
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        const int high = hex_value(text[2 * i]), low = hex_value(text[2 * i + 1]);
        if (high < 0 || low < 0) return false;
        bytes[i] = static_cast<std::byte>(high << 4 | low);
    }
    return true;
}

constexpr std::size_t kDigestDigits = 2 * kDigestBytes, kKeyDigits = kDigestDigits + 1 + 2 * kChunkHashBytes;

bool take_beginning(std::string_view& name, std::string_view prefix, std::string_view scheme) {
    if (!name.starts_with(prefix) || !name.substr(prefix.size()).starts_with(scheme)) return false;
    name.remove_prefix(prefix.size() + scheme.size());
    return true;
}

// Reads kKeyDigits characters.
std::optional<std::array<std::byte, kObjectKeyBytes>> parse_key(std::string_view digits) {
    std::array<std::byte, kObjectKeyBytes> key;
    const std::span<std::byte> bytes(key);
    if (digits[kDigestDigits] != '/' || !parse_hex(digits.substr(0, kDigestDigits), bytes.first(kDigestBytes)) ||
        !parse_hex(digits.substr(kDigestDigits + 1), bytes.subspan(kDigestBytes)))
        return std::nullopt;
    return key;
}

std::string name_below(std::string_view prefix, std::string_view scheme, ObjectKeyView key) {
    std::string name;
    name.reserve(prefix.size() + scheme.size() + 2 * kObjectKeyBytes + 64);
    name.append(prefix).append(scheme);
    append_hex(name, key.first<kDigestBytes>());
    name.append(1, '/');
    append_hex(name, key.last<kChunkHashBytes>());
    return name;
}

std::uint64_t count_parts(std::uint64_t total_bytes, std::uint64_t part_bytes) {
    return total_bytes / part_bytes + (total_bytes % part_bytes != 0 ? 1 : 0);
}

}  // namespace

std::string resp_object_name(std::string_view prefix, ObjectKeyView key) { return name_below(prefix, kObjects, key); }

std::optional<std::array<std::byte, kObjectKeyBytes>> parse_resp_object_name(std::string_view prefix,
                                                                             std::string_view name) {
    if (!take_beginning(name, prefix, kObjects) || name.size() != kKeyDigits) return std::nullopt;
    return parse_key(name);
}

std::optional<RespPartName> parse_resp_part_name(std::string_view prefix, std::string_view name) {
    constexpr std::size_t kIdDigits = 2 * RespManifest::kWriteIdBytes, kMostNumberDigits = 4;
    constexpr std::size_t kNumberAt = kKeyDigits + 1 + kIdDigits + 1;
    if (!take_beginning(name, prefix, kParts) || name.size() <= kNumberAt ||
        name.size() > kNumberAt + kMostNumberDigits || name[kKeyDigits] != '/' || name[kNumberAt - 1] != '/' ||
        name.find_first_not_of("0123456789", kNumberAt) != std::string_view::npos)
        return std::nullopt;
    const auto key = parse_key(name.substr(0, kKeyDigits));
    RespPartName part;
    if (!key || !parse_hex(name.substr(kKeyDigits + 1, kIdDigits), part.write_id)) return std::nullopt;
    part.key = *key;
    return part;
}

std::string resp_object_pattern(std::string_view prefix) { return std::string(prefix).append(kObjects).append("*"); }
std::string resp_part_pattern(std::string_view prefix) { return std::string(prefix).append(kParts).append("*"); }

RespManifest RespManifest::make(std::uint64_t total_bytes, std::uint64_t part_bytes) {
    RespManifest manifest;
    manifest.parts = static_cast<std::uint32_t>(count_parts(total_bytes, part_bytes));
    manifest.part_bytes = part_bytes;
    manifest.total_bytes = total_bytes;
    if (::getrandom(manifest.write_id.data(), manifest.write_id.size(), 0) != kWriteIdBytes)
        throw std::system_error(errno, std::generic_category(), "getrandom");
    return manifest;
}

std::optional<RespManifest> RespManifest::parse(std::span<const std::byte> bytes) {
    ManifestImage image;
    if (bytes.size() != sizeof image) return std::nullopt;
    std::memcpy(&image, bytes.data(), sizeof image);
    if (std::memcmp(image.magic, kManifestMagic, sizeof image.magic) != 0 || image.version != kManifestVersion ||
        image.checksum != checksum_of(image))
        return std::nullopt;
    if (image.parts < 2 || image.parts > kMaxParts || image.part_bytes == 0 || image.total_bytes > kMaxBytes ||
        count_parts(image.total_bytes, image.part_bytes) != image.parts)
        return std::nullopt;
    RespManifest manifest;
    manifest.parts = image.parts;
    manifest.part_bytes = image.part_bytes;
    manifest.total_bytes = image.total_bytes;
    std::ranges::copy(image.write_id, manifest.write_id.begin());
    return manifest;
}

RespManifest::Image RespManifest::image() const {
    ManifestImage image{};
    std::memcpy(image.magic, kManifestMagic, sizeof image.magic);
    image.version = kManifestVersion;
    image.parts = parts;
    image.part_bytes = part_bytes;
    image.total_bytes = total_bytes;
    std::ranges::copy(write_id, image.write_id);
    image.checksum = checksum_of(image);
    Image bytes;
    std::memcpy(bytes.data(), &image, sizeof image);
    return bytes;
}

std::string RespManifest::part_name(std::string_view prefix, ObjectKeyView key, std::uint32_t part) const {
    std::string name = name_below(prefix, kParts, key);
    name.append(1, '/');
    append_hex(name, write_id);
    return name.append(1, '/').append(std::to_string(part));
}

std::uint64_t RespManifest::bytes_of(std::uint32_t part) const {
    return part + 1 < parts ? part_bytes : total_bytes - part_bytes * (parts - 1);
}

}  // namespace lmcache
