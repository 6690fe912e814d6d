#include "lmcache/object_cipher.h"

#include <cstring>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "check.h"

using namespace lmcache;

namespace {

using Bytes = std::vector<std::byte>;

Bytes counted(std::size_t size, int first, int step = 1) {
    Bytes bytes(size);
    for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(first + step * static_cast<int>(i));
    return bytes;
}

MasterKey master(int first) {
    MasterKey key;
    for (std::size_t i = 0; i < key.bytes.size(); ++i) key.bytes[i] = static_cast<std::byte>(first + i);
    return key;
}

std::string hex(std::span<const std::byte> bytes) {
    std::string text;
    for (const std::byte value : bytes) {
        char digits[3];
        std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned>(value));
        text += digits;
    }
    return text;
}

void no_random(std::span<std::byte> bytes) { std::ranges::fill(bytes, std::byte{0xa5}); }

const Bytes kNamespace = counted(40, 100),
            kHash(32, std::byte{7}), kEarlier = {std::byte{'e'}, std::byte{'a'}, std::byte{'r'}, std::byte{'l'},
                                                 std::byte{'i'}, std::byte{'e'}, std::byte{'r'}};

CipherObject object(const Bytes& name_space = kNamespace, const Bytes& hash = kHash, const Bytes& earlier = kEarlier) {
    return {name_space, std::span<const std::byte, 32>(hash.data(), 32), earlier};
}

struct Sealed {
    Bytes sealed;
    std::array<std::byte, kSealBytes> seal;
};

Sealed sealed_by(const ObjectCipher& cipher, const Bytes& plain) {
    Sealed made{Bytes(plain.size()), {}};
    cipher.seal(plain, made.sealed, object(), made.seal);
    return made;
}

OpenFault opened(const ObjectCipher& cipher, const Sealed& made, const Bytes& plain,
                 const CipherObject& name = object()) {
    Bytes found(plain.size(), std::byte{0xee});
    const OpenFault fault = cipher.open(made.sealed, found, name, made.seal);
    CHECK(found == (fault == OpenFault::kNone ? plain : Bytes(plain.size())));  // nothing that is not authentic
    return fault;
}

}  // namespace

TEST_CASE(hkdf_is_that_of_rfc_5869) {
    Bytes derived(42);
    hkdf_sha256(counted(13, 0), Bytes(22, std::byte{0x0b}), counted(10, 0xf0), derived);
    CHECK(hex(derived) == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865");
    hkdf_sha256({}, Bytes(22, std::byte{0x0b}), {}, derived);
    CHECK(hex(derived) == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8");
}

// Made with the Python package `cryptography` from docs/formats/aesgcm.md.
TEST_CASE(what_is_sealed_is_what_the_format_says) {
    const Bytes plain = counted(100, 0, 7);
    const char* const expected[] = {
        "b97ac437dee3f3bc1cd10453b3ea6ed61cefbcebff6a8384ac47cf5888b4face9e851f92cb5d29124a4ee3cc249c3ef5"
        "c49608a1f95ac6fc22f8251b3e50f5042cf2ba5466b524f27b4ce60a436b5d290e7187559e45aa8912b6f791c3cec161"
        "7a897cf40a6d32210445185c9254e964e3b38b56",
        "8a9ea9b42458333d78d1e0be05d9d0a92dd8b4e9c02a9d4e34aa66a4d0b5e8f3f58112d01a62108f4afad29e6e8908ff"
        "df935e23163b63a7954c90e2dfc53f3512ea570320324d07b00552ba7716cb8b8f9435f66d6a503a31f8cfa8e06c5e3b"
        "f62b8decde3f0472e5c73a5d79631953dfe0b3f6"};
    for (const unsigned bits : {128U, 256U}) {
        const Sealed made = sealed_by(ObjectCipher({master(0)}, bits, no_random), plain);
        CHECK(hex(made.sealed) + hex(std::span(made.seal).last(16)) == expected[bits / 256]);
        CHECK(hex(std::span(made.seal).subspan(8, 16)) == "6de5a5ee64ee8aa51eebd4eac98be162");
        CHECK(hex(master_key_id(master(0))) == "6de5a5ee64ee8aa51eebd4eac98be162");
    }
}

TEST_CASE(every_size_opens_under_either_key_size) {
    const ObjectCipher small({master(0)}, 128), large({master(0)}, 256);
    for (const std::size_t size : {0UL, 1UL, 15UL, 16UL, 17UL, 4096UL, 100'001UL}) {
        const Bytes plain = counted(size, 3);
        CHECK(opened(large, sealed_by(small, plain), plain) == OpenFault::kNone);
        CHECK(opened(small, sealed_by(large, plain), plain) == OpenFault::kNone);
    }
}

TEST_CASE(another_name_or_other_parameters_do_not_open) {
    const ObjectCipher cipher({master(0)}, 256);
    const Bytes plain = counted(5000, 1);
    const Sealed made = sealed_by(cipher, plain);
    Bytes longer = kNamespace;
    longer.push_back(kEarlier[0]);
    const Bytes shorter(kEarlier.begin() + 1, kEarlier.end());
    CHECK(opened(cipher, made, plain, object(counted(40, 101))) == OpenFault::kForged);
    CHECK(opened(cipher, made, plain, object(kNamespace, Bytes(32, std::byte{8}))) == OpenFault::kForged);
    CHECK(opened(cipher, made, plain, object(kNamespace, kHash, shorter)) == OpenFault::kForged);
    CHECK(opened(cipher, made, plain, object(longer, kHash, shorter)) == OpenFault::kForged);
    CHECK(opened(cipher, made, plain) == OpenFault::kNone);
}

TEST_CASE(every_changed_bit_is_found) {
    const ObjectCipher cipher({master(0)}, 256);
    const Bytes plain = counted(200, 1);
    const Sealed made = sealed_by(cipher, plain);
    for (std::size_t bit = 0; bit < 8 * (plain.size() + kSealBytes); ++bit) {
        Sealed changed = made;
        std::byte& place = bit / 8 < plain.size() ? changed.sealed[bit / 8] : changed.seal[bit / 8 - plain.size()];
        place ^= static_cast<std::byte>(1 << bit % 8);
        CHECK(opened(cipher, changed, plain) != OpenFault::kNone);
    }
}

TEST_CASE(hostile_sizes_and_seals_do_not_open) {
    const ObjectCipher cipher({master(0)}, 128);
    const Bytes plain = counted(64, 1);
    const Sealed made = sealed_by(cipher, plain);
    std::mt19937 random(5);
    for (int round = 0; round < 20'000; ++round) {
        Bytes seal(made.seal.begin(), made.seal.end());
        if (round % 2 == 0) seal.resize(random() % 100);
        for (unsigned i = random() % 4; i > 0 && !seal.empty(); --i)
            seal[random() % seal.size()] = static_cast<std::byte>(random());
        const Bytes sealed(made.sealed.begin(), made.sealed.begin() + static_cast<std::ptrdiff_t>(random() % 65));
        Bytes found(round % 3 == 0 ? sealed.size() : random() % 130);
        const bool is_whole = seal == Bytes(made.seal.begin(), made.seal.end()) && sealed.size() == plain.size() &&
                              found.size() == plain.size();
        CHECK((cipher.open(sealed, found, object(), seal) == OpenFault::kNone) == is_whole);
    }
    const Sealed made_empty = sealed_by(cipher, {});
    CHECK(opened(cipher, made_empty, {}) == OpenFault::kNone);
}

TEST_CASE(old_and_new_keys_open_side_by_side) {
    const Bytes plain = counted(300, 1);
    ObjectCipher cipher({master(0)}, 256);
    const Sealed old = sealed_by(cipher, plain);
    cipher.replace_keys({master(50), master(0)});
    const Sealed young = sealed_by(cipher, plain);
    CHECK(opened(cipher, old, plain) == OpenFault::kNone && opened(cipher, young, plain) == OpenFault::kNone);
    cipher.replace_keys({master(50)});
    CHECK(opened(cipher, old, plain) == OpenFault::kUnknownKey && opened(cipher, young, plain) == OpenFault::kNone);
    CHECK(opened(ObjectCipher({master(0)}, 256), young, plain) == OpenFault::kUnknownKey);
    CHECK(refused([&] { cipher.replace_keys({}); }));
    CHECK(opened(cipher, young, plain) == OpenFault::kNone);
    Sealed relabelled = young;  // with the other key's name
    const auto other_id = master_key_id(master(0));
    std::ranges::copy(other_id, relabelled.seal.begin() + 8);
    CHECK(opened(ObjectCipher({master(50), master(0)}, 256), relabelled, plain) == OpenFault::kForged);
    for (const int version : {0, 1, 3}) {  // of the format
        Sealed other = young;
        other.seal[0] = static_cast<std::byte>(version);
        CHECK(opened(cipher, other, plain) == OpenFault::kUnknownKey);
    }
}

TEST_CASE(no_two_seals_share_key_and_nonce) {
    const ObjectCipher cipher({master(0)}, 256);
    const Bytes plain(64);  // the sealed bytes are the key stream
    std::set<Bytes> salts, streams;
    for (int i = 0; i < 4096; ++i) {
        const Sealed made = sealed_by(cipher, plain);
        salts.emplace(made.seal.begin() + 24, made.seal.begin() + 56);
        streams.insert(made.sealed);
    }
    CHECK(salts.size() == 4096 && streams.size() == 4096);
}

TEST_CASE(one_draw_of_random_bits_twice_still_gives_other_objects_other_key_streams) {
    const ObjectCipher stuck({master(0)}, 256, no_random), small({master(0)}, 128, no_random);
    const Bytes plain(64);  // the sealed bytes are the key stream
    const Bytes other_namespace = counted(40, 101), other_hash(32, std::byte{8}), other_parameters(7, std::byte{'e'});
    Bytes moved_hash = kHash;  // the same bytes, divided elsewhere
    moved_hash.back() = kEarlier.front();
    std::set<Bytes> streams;
    for (const ObjectCipher* const cipher : {&stuck, &small}) {
        for (const CipherObject& named : {object(), object(other_namespace), object(kNamespace, other_hash),
                                          object(kNamespace, kHash, other_parameters), object(kNamespace, kHash, {}),
                                          object(kNamespace, moved_hash)}) {
            Bytes sealed(64);
            std::array<std::byte, kSealBytes> seal;
            cipher->seal(plain, sealed, named, seal);
            streams.insert(sealed);
        }
    }
    CHECK(streams.size() == 12);
}

TEST_CASE(more_namespaces_than_are_kept_open_all_the_same) {
    const ObjectCipher cipher({master(0)}, 256);
    const Bytes plain = counted(32, 1);
    std::vector<Sealed> all;
    const auto named = [](std::size_t i) {
        Bytes name = kNamespace;
        std::memcpy(name.data(), &i, sizeof i);
        return name;
    };
    for (std::size_t i = 0; i < 3000; ++i) {
        Sealed made{Bytes(plain.size()), {}};
        cipher.seal(plain, made.sealed, object(named(i)), made.seal);
        all.push_back(made);
    }
    for (std::size_t i = 0; i < all.size(); i += 7) {
        CHECK(opened(cipher, all[i], plain, object(named(i))) == OpenFault::kNone);
        CHECK(opened(cipher, all[i], plain, object(named(i + 1))) == OpenFault::kForged);
    }
}

TEST_CASE(a_seal_without_random_bits_is_refused) {
    const ObjectCipher cipher({master(0)}, 256, [](std::span<std::byte>) { throw CryptoError("none"); });
    const Bytes plain = counted(64, 1);
    Bytes sealed(64);
    std::array<std::byte, kSealBytes> seal{};
    CHECK(refused<CryptoError>([&] { cipher.seal(plain, sealed, object(), seal); }));
    CHECK(sealed == Bytes(64));
}

TEST_CASE(keys_are_replaced_while_others_seal_and_open) {
    ObjectCipher cipher({master(0), master(50)}, 256);
    const Bytes plain = counted(1000, 1);
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
        threads.emplace_back([&] {
            for (int round = 0; round < 200; ++round)
                CHECK(opened(cipher, sealed_by(cipher, plain), plain) == OpenFault::kNone);
        });
    }
    for (int round = 0; round < 200; ++round)
        cipher.replace_keys(round % 2 == 0 ? std::vector{master(50), master(0)} : std::vector{master(0), master(50)});
    for (std::thread& thread : threads) thread.join();
}

TEST_CASE(bad_arguments_of_ciphers_are_refused) {
    CHECK(refused([] { ObjectCipher({}, 256); }));
    CHECK(refused([] { ObjectCipher({master(0)}, 192); }));
    CHECK(refused([] { ObjectCipher(std::vector(17, master(0)), 256); }));
    const ObjectCipher cipher({master(0)}, 256);
    const Bytes plain(64);
    Bytes sealed(63);
    std::array<std::byte, kSealBytes> seal;
    CHECK(refused([&] { cipher.seal(plain, sealed, object(), seal); }));
    CHECK(crypto_refusal().empty());
}
