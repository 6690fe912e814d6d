#include "lmcache/blake3.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "lmcache/chunk_hash.h"

using namespace lmcache;

namespace {

struct Golden {
    std::size_t input_bytes;
    const char* digest;
};

// Inputs are the bytes 0, 1, ... 250, 0, 1 ...; digests were computed by another implementation.
constexpr Golden kGolden[] = {
    {0, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"},
    {1, "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"},
    {63, "e9bc37a594daad83be9470df7f7b3798297c3d834ce80ba85d6e207627b7db7b"},
    {64, "4eed7141ea4a5cd4b788606bd23f46e212af9cacebacdc7d1f4c6dc7f2511b98"},
    {65, "de1e5fa0be70df6d2be8fffd0e99ceaa8eb6e8c93a63f2d8d1c30ecb6b263dee"},
    {127, "d81293fda863f008c09e92fc382a81f5a0b4a1251cba1634016a0f86a6bd640d"},
    {128, "f17e570564b26578c33bb7f44643f539624b05df1a76c81f30acd548c44b45ef"},
    {1023, "10108970eeda3eb932baac1428c7a2163b0e924c9a9e25b35bba72b28f70bd11"},
    {1024, "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7"},
    {1025, "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444"},
    {2048, "e776b6028c7cd22a4d0ba182a8bf62205d2ef576467e838ed6f2529b85fba24a"},
    {2049, "5f4d72f40d7a5f82b15ca2b2e44b1de3c2ef86c426c95c1af0b6879522563030"},
    {3072, "b98cb0ff3623be03326b373de6b9095218513e64f1ee2edd2525c7ad1e5cffd2"},
    {3073, "7124b49501012f81cc7f11ca069ec9226cecb8a2c850cfe644e327d22d3e1cd3"},
    {4096, "015094013f57a5277b59d8475c0501042c0b642e531b0a1c8f58d2163229e969"},
    {5120, "9cadc15fed8b5d854562b26a9536d9707cadeda9b143978f319ab34230535833"},
    {8192, "aae792484c8efe4f19e2ca7d371d8c467ffb10748d8a5a1ae579948f718a2a63"},
    {8193, "bab6c09cb8ce8cf459261398d2e7aef35700bf488116ceb94a36d0f5f1b7bc3b"},
    {16384, "f875d6646de28985646f34ee13be9a576fd515f76b5b0a26bb324735041ddde4"},
    {31744, "62b6960e1a44bcc1eb1a611a8d6235b6b4b78f32e7abc4fb4c6cdcce94895c47"},
    {102400, "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085"},
};

std::vector<std::byte> counting(std::size_t size) {
    std::vector<std::byte> bytes(size);
    for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i % 251);
    return bytes;
}

std::string hex(const void* bytes, std::size_t size) {
    std::string text;
    for (std::size_t i = 0; i < size; ++i) {
        char digits[3];
        std::snprintf(digits, sizeof digits, "%02x", static_cast<const unsigned char*>(bytes)[i]);
        text += digits;
    }
    return text;
}

TEST_CASE(golden_digests) {
    for (const Golden& golden : kGolden) {
        const auto input = counting(golden.input_bytes);
        const Blake3Digest digest = blake3(input);
        CHECK(hex(digest.data(), digest.size()) == golden.digest);
    }
}

// However many inputs lie side by side, each has the digest that it has alone.
TEST_CASE(many_equal_one) {
    std::size_t tested = 0;
    for (const std::size_t lanes : {1, 4, 8, 16}) {
        for (const std::size_t size : {1, 4, 60, 64, 68, 128, 1020, 1024, 1028, 2048, 5000}) {
            const std::size_t count = 2 * lanes + 7;
            const auto inputs = counting(size * count);
            std::vector<std::byte> digests(count * kBlake3Bytes);
            if (!blake3_many_by(lanes, inputs.data(), size, count, digests.data())) continue;
            ++tested;
            for (std::size_t i = 0; i < count; ++i) {
                const Blake3Digest alone = blake3({inputs.data() + i * size, size});
                CHECK(std::memcmp(alone.data(), digests.data() + i * kBlake3Bytes, kBlake3Bytes) == 0);
            }
        }
    }
    CHECK(tested >= 22);
    CHECK(!blake3_many_by(3, nullptr, 0, 0, nullptr));
}

TEST_CASE(chunk_hashes_are_chained) {
    std::vector<std::uint32_t> tokens(256 * 11 + 5);
    for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::uint32_t>(i * 2654435761U);
    std::vector<std::byte> parent(32, std::byte{9});
    std::vector<std::byte> extras(11 * 32);
    extras[3 * 32 + 31] = std::byte{1};
    const auto hashes = hash_chunks(tokens, 256, parent, extras);
    CHECK(hashes.size() == 11 * 32);
    for (std::size_t i = 0; i < 11; ++i) {
        const Blake3Digest own = blake3({reinterpret_cast<const std::byte*>(tokens.data() + 256 * i), 1024});
        std::vector<std::byte> link = parent;
        const auto* digest = reinterpret_cast<const std::byte*>(own.data());
        link.insert(link.end(), digest, digest + 32);
        if (i == 3) link.insert(link.end(), extras.begin() + 3 * 32, extras.begin() + 4 * 32);
        const Blake3Digest hash = blake3(link);
        CHECK(std::memcmp(hash.data(), hashes.data() + 32 * i, 32) == 0);
        std::memcpy(parent.data(), hash.data(), 32);
    }
}

TEST_CASE(wrong_sizes_are_refused) {
    const std::vector<std::uint32_t> tokens(16);
    const std::vector<std::byte> parent(32);
    CHECK(hash_chunks({}, 16, parent, {}).empty());
    CHECK(hash_chunks(tokens, 17, parent, {}).empty());
    CHECK(refused([&] { hash_chunks(tokens, 0, parent, {}); }));
    CHECK(refused([&] { hash_chunks(tokens, 16, std::span(parent).first(31), {}); }));
    CHECK(refused([&] { hash_chunks(tokens, 8, parent, parent); }));
}

}  // namespace
