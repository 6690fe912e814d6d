#include "lmcache/checksum.h"

#include <bit>
#include <cstring>

#include "crc_fold.h"
#include "lmcache/cpu.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#endif

static_assert(std::endian::native == std::endian::little,
              "formats are little-endian and are written as they lie in memory");

namespace lmcache {
namespace {

constexpr std::uint32_t kPolynomialReflected = 0x82f63b78;

// kTables[k][b]: the register after byte b and then k zero bytes, so that eight look-ups advance it by eight bytes.
constexpr auto kTables = [] {
    std::array<std::array<std::uint32_t, 256>, 8> tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomialReflected : 0);
        tables[0][byte] = crc;
    }
    for (std::size_t k = 1; k < 8; ++k) {
        for (std::size_t byte = 0; byte < 256; ++byte) {
            const std::uint32_t crc = tables[k - 1][byte];
            tables[k][byte] = (crc >> 8) ^ tables[0][crc & 0xff];
        }
    }
    return tables;
}();

std::uint64_t load_word(const std::byte* at) {
    std::uint64_t word;
    std::memcpy(&word, at, sizeof word);
    return word;
}

std::uint32_t crc32c_portable(const std::byte* at, std::size_t size) {
    std::uint32_t crc = ~0U;
    for (; size >= 8; at += 8, size -= 8) crc = crc32c_word_portable(crc, load_word(at));
    for (; size > 0; ++at, --size) crc = crc32c_byte_portable(crc, static_cast<std::uint8_t>(*at));
    return ~crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t crc32c_hardware(const std::byte* at, std::size_t size) {
    std::uint64_t crc = ~0U;
    if (size >= 2 * kFoldStepBytes && can_fold(cpu_features())) {
        const std::size_t folded_bytes = size / kFoldStepBytes * kFoldStepBytes;
        crc = fold_crc32c(~0U, at, folded_bytes);
        at += folded_bytes;
        size -= folded_bytes;
    }
    for (; size >= 8; at += 8, size -= 8) crc = _mm_crc32_u64(crc, load_word(at));
    auto narrow = static_cast<std::uint32_t>(crc);
    for (; size > 0; ++at, --size) narrow = _mm_crc32_u8(narrow, static_cast<std::uint8_t>(*at));
    return ~narrow;
}
#elif defined(__aarch64__)
__attribute__((target("+crc"))) std::uint32_t crc32c_hardware(const std::byte* at, std::size_t size) {
    std::uint32_t crc = ~0U;
    for (; size >= 8; at += 8, size -= 8) crc = __crc32cd(crc, load_word(at));
    for (; size > 0; ++at, --size) crc = __crc32cb(crc, static_cast<std::uint8_t>(*at));
    return ~crc;
}
#else
std::uint32_t crc32c_hardware(const std::byte* at, std::size_t size) { return crc32c_portable(at, size); }
#endif

}  // namespace

std::uint32_t crc32c_word_portable(std::uint32_t crc, std::uint64_t word) {
    word ^= crc;
    std::uint32_t result = 0;
    for (std::size_t byte = 0; byte < 8; ++byte) result ^= kTables[7 - byte][(word >> (8 * byte)) & 0xff];
    return result;
}

std::uint32_t crc32c_byte_portable(std::uint32_t crc, std::uint8_t byte) {
    return (crc >> 8) ^ kTables[0][(crc ^ byte) & 0xff];
}

std::uint32_t crc32c(std::span<const std::byte> bytes) {
    const CpuFeatures& cpu = cpu_features();
    return cpu.sse42 || cpu.arm_crc32 ? crc32c_hardware(bytes.data(), bytes.size())
                                      : crc32c_portable(bytes.data(), bytes.size());
}

PayloadChecksum LaneChecksum::finish() {
    if (pending_bytes != 0) lanes[next_lane] = crc32c_word_portable(lanes[next_lane], pending);
    PayloadChecksum result;
    for (std::size_t lane = 0; lane < kChecksumLanes; ++lane) {
        const std::uint32_t value = ~lanes[lane];
        std::memcpy(result.data() + 4 * lane, &value, sizeof value);
    }
    return result;
}

}  // namespace lmcache
