// Encrypts objects by AES in Galois/counter mode, each with a key and a nonce of its own (docs/formats/aesgcm.md).
//
// Invariant: a caller chooses neither key nor nonce. Both are derived from 256 bits that are drawn for each call of
// seal() and from what is sealed, so that no two objects share them (docs/decisions/encryption.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lmcache/crypto_library.h"
#include "lmcache/limits.h"
#include "lmcache/mutex.h"

namespace lmcache {

inline constexpr std::size_t kMasterKeyBytes = 32;
inline constexpr std::size_t kKeyIdBytes = 16;
inline constexpr std::size_t kMaxMasterKeys = 16;
inline constexpr std::size_t kSealBytes = 72;
inline constexpr std::uint64_t kMaxSealedBytes = (std::uint64_t{1} << 36) - 32;  // of GCM: NIST SP 800-38D, 5.2.1.1

// Overwritten when it ends.
struct MasterKey {
    std::array<std::byte, kMasterKeyBytes> bytes;
    ~MasterKey();
};

// What an object is bound to: another name, or other parameters before it, and it does not open.
struct CipherObject {
    std::span<const std::byte> name_space;  // with the salt; each has keys of its own
    std::span<const std::byte, kChunkHashBytes> chunk_hash;
    std::span<const std::byte> earlier_parameters;
};

// kUnknownKey: sealed with a key that is not here, or in a version that is not known; nothing is wrong with it.
enum class OpenFault : std::uint8_t { kNone, kForged, kUnknownKey };

// HKDF with SHA-256 (RFC 5869); at most 8,160 bytes. Throws CryptoError.
void hkdf_sha256(std::span<const std::byte> salt, std::span<const std::byte> key, std::span<const std::byte> info,
                 std::span<std::byte> derived);

// The second half of that: `key` is uniform already. Throws CryptoError.
void hkdf_expand_sha256(std::span<const std::byte, 32> key, std::span<const std::byte> info,
                        std::span<std::byte> derived);

// Names a master key without telling anything of it. Throws CryptoError.
std::array<std::byte, kKeyIdBytes> master_key_id(const MasterKey& key);

// From the kernel. Throws CryptoError.
void fill_random(std::span<std::byte> bytes);

// Thread-safe.
class ObjectCipher {
public:
    // `aes_bits`, 128 or 256, is of what is sealed; either is opened. `random` must be fill_random but in tests.
    // Throws std::invalid_argument and CryptoError.
    ObjectCipher(std::vector<MasterKey> keys, unsigned aes_bits, void (*random)(std::span<std::byte>) = fill_random);
    ~ObjectCipher();

    // The first key seals, all of them open. Throws std::invalid_argument and CryptoError; the keys stay then.
    void replace_keys(std::vector<MasterKey> keys) LMCACHE_EXCLUDES(mutex_);

    // Encrypts `plain` into as many bytes of `sealed`, and writes what open() needs. Throws std::invalid_argument for
    // sizes that do not fit, and CryptoError.
    void seal(std::span<const std::byte> plain, std::span<std::byte> sealed, const CipherObject& object,
              std::span<std::byte, kSealBytes> seal) const LMCACHE_EXCLUDES(mutex_);

    // Decrypts `sealed` into as many bytes of `plain`. With a fault `plain` is zero. Sealed bytes and the seal may be
    // anything, of any size. Throws CryptoError where the library fails.
    OpenFault open(std::span<const std::byte> sealed, std::span<std::byte> plain, const CipherObject& object,
                   std::span<const std::byte> seal) const LMCACHE_EXCLUDES(mutex_);

private:
    struct NamedKey;
    using Keys = std::vector<NamedKey>;

    static std::shared_ptr<const Keys> named(std::vector<MasterKey> keys);
    std::shared_ptr<const Keys> current() const LMCACHE_EXCLUDES(mutex_);

    const unsigned aes_bits_;
    void (*const random_)(std::span<std::byte>);
    mutable Mutex mutex_;
    std::shared_ptr<const Keys> keys_ LMCACHE_GUARDED_BY(mutex_);
};

}  // namespace lmcache
