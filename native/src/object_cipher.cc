#include "lmcache/object_cipher.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>

namespace lmcache {
namespace {

constexpr std::uint32_t kSealVersion = 2;
constexpr std::size_t kHashBytes = 32, kSaltBytes = 32, kNonceBytes = 12, kTagBytes = 16;
constexpr std::size_t kMaxAesKeyBytes = 32;
constexpr std::size_t kMaxNamespaceKeys = 1024;                      // of a master key, at once
constexpr std::size_t kUpdateBytes = std::size_t{1} << 30;           // OpenSSL counts in int
constexpr int kSetNonceBytes = 0x9, kGetTag = 0x10, kSetTag = 0x11;  // EVP_CTRL_AEAD_...

// Little-endian, as everything in a frame.
struct Seal {
    std::uint32_t version;
    std::uint32_t aes_bits;
    std::uint8_t key_id[kKeyIdBytes];
    std::uint8_t salt[kSaltBytes];
    std::uint8_t tag[kTagBytes];
};
static_assert(sizeof(Seal) == kSealBytes);
constexpr std::size_t kAuthenticatedSealBytes = offsetof(Seal, tag);

const unsigned char* raw(std::span<const std::byte> bytes) {
    return reinterpret_cast<const unsigned char*>(bytes.data());
}

// Overwritten when it ends.
template <std::size_t kSize>
struct Secret {
    std::array<std::byte, kSize> bytes{};
    Secret() = default;
    Secret(const Secret&) = delete;
    Secret& operator=(const Secret&) = delete;
    ~Secret() { ::explicit_bzero(bytes.data(), kSize); }
};

void hmac(std::span<const std::byte> key, std::span<const std::byte> data, std::span<std::byte, kHashBytes> code) {
    const auto& crypto = CryptoLibrary::instance();
    if (crypto.hmac(crypto.sha256(), key.data(), static_cast<int>(key.size()), raw(data), data.size(),
                    reinterpret_cast<unsigned char*>(code.data()), nullptr) == nullptr)
        throw CryptoError("OpenSSL cannot compute HMAC with SHA-256");
}

void append(std::vector<std::byte>& bytes, std::span<const std::byte> more) {
    bytes.insert(bytes.end(), more.begin(), more.end());
}

// A label, a zero byte and what the key is for: no two uses of HKDF have the same.
std::vector<std::byte> info_of(std::string_view label, std::span<const std::byte> context) {
    std::vector<std::byte> info;
    append(info, std::as_bytes(std::span(label)));
    info.push_back(std::byte{0});
    append(info, context);
    return info;
}

// Keys of namespaces, derived once: that takes about as long as to encrypt 16 KiB. Thread-safe.
class NamespaceKeys {
public:
    using Key = Secret<kHashBytes>;

    void find_or_derive(const MasterKey& master, std::span<const std::byte> name_space, Key& key)
        LMCACHE_EXCLUDES(mutex_) {
        const std::string_view name(reinterpret_cast<const char*>(name_space.data()), name_space.size());
        {
            const MutexLock lock(mutex_);
            if (const auto known = keys_.find(name); known != keys_.end()) {
                key.bytes = known->second.bytes;
                return;
            }
        }
        hkdf_sha256({}, master.bytes, info_of("lmcache aesgcm 2 namespace", name_space), key.bytes);
        const MutexLock lock(mutex_);
        if (keys_.size() >= kMaxNamespaceKeys) keys_.clear();
        keys_[std::string(name)].bytes = key.bytes;
    }

private:
    struct NameHash : std::hash<std::string_view> {
        using is_transparent = void;
    };

    Mutex mutex_;
    std::unordered_map<std::string, Key, NameHash, std::equal_to<>> keys_ LMCACHE_GUARDED_BY(mutex_);
};

struct ObjectKey {
    Secret<kMaxAesKeyBytes + kNonceBytes> secret;
    std::size_t key_bytes = 0;
    const unsigned char* key() const { return raw(secret.bytes); }
    const unsigned char* nonce() const { return raw(secret.bytes) + key_bytes; }
};

// What is authenticated besides the payload. Lengths stand before what has no fixed one.
std::vector<std::byte> authenticated_data(const CipherObject& object, const Seal& seal) {
    std::vector<std::byte> data;
    const auto append_sized = [&](std::span<const std::byte> bytes) {
        const std::uint64_t size = bytes.size();
        append(data, std::as_bytes(std::span(&size, 1)));
        append(data, bytes);
    };
    append(data, std::as_bytes(std::span(&seal, 1)).first(kAuthenticatedSealBytes));
    append(data, object.chunk_hash);
    append_sized(object.name_space);
    append_sized(object.earlier_parameters);
    return data;
}

// One pass over a payload. Any failure of the library is a CryptoError, but that of authenticates().
class Pass {
public:
    Pass(const ObjectKey& key, bool encrypts) : context_(crypto_.context_new()) {
        if (context_ == nullptr) throw std::bad_alloc();
        const CipherHandle cipher = key.key_bytes == 16 ? crypto_.aes_128_gcm() : crypto_.aes_256_gcm();
        const int direction = encrypts ? 1 : 0;
        if (crypto_.begin(context_, cipher, nullptr, nullptr, nullptr, direction) != 1 ||
            crypto_.context_control(context_, kSetNonceBytes, kNonceBytes, nullptr) != 1 ||
            crypto_.begin(context_, nullptr, nullptr, key.key(), key.nonce(), direction) != 1) {
            crypto_.context_free(context_);
            throw CryptoError("OpenSSL cannot use AES-GCM");
        }
    }
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;
    ~Pass() {
        crypto_.context_free(context_);
        crypto_.clear_errors();
    }

    void authenticate(std::span<const std::byte> data) { update(data, nullptr); }
    void convert(std::span<const std::byte> from, std::byte* to) { update(from, to); }

    void tag(std::span<std::uint8_t, kTagBytes> tag) {
        unsigned char nothing[kTagBytes];
        int written = 0;
        if (crypto_.finish(context_, nothing, &written) != 1 ||
            crypto_.context_control(context_, kGetTag, kTagBytes, tag.data()) != 1)
            throw CryptoError("OpenSSL cannot finish AES-GCM");
    }

    bool authenticates(std::span<const std::uint8_t, kTagBytes> expected) {
        unsigned char tag[kTagBytes], nothing[kTagBytes];
        std::ranges::copy(expected, tag);
        if (crypto_.context_control(context_, kSetTag, kTagBytes, tag) != 1)
            throw CryptoError("OpenSSL cannot take a tag of AES-GCM");
        int written = 0;
        return crypto_.finish(context_, nothing, &written) == 1;
    }

private:
    void update(std::span<const std::byte> from, std::byte* to) {
        for (std::size_t at = 0; at < from.size(); at += kUpdateBytes) {
            const std::size_t size = std::min(kUpdateBytes, from.size() - at);
            auto* const target = to == nullptr ? nullptr : reinterpret_cast<unsigned char*>(to + at);
            int written = 0;
            if (crypto_.update(context_, target, &written, raw(from) + at, static_cast<int>(size)) != 1 ||
                written != static_cast<int>(size))
                throw CryptoError("OpenSSL cannot run AES-GCM");
        }
    }

    const CryptoLibrary& crypto_ = CryptoLibrary::instance();
    const CipherContextHandle context_;
};

}  // namespace

MasterKey::~MasterKey() { ::explicit_bzero(bytes.data(), bytes.size()); }

struct ObjectCipher::NamedKey {
    MasterKey key;
    std::array<std::byte, kKeyIdBytes> id;
    std::unique_ptr<NamespaceKeys> of_namespaces = std::make_unique<NamespaceKeys>();

    // The random bits alone would do. The name and the earlier parameters, with the checksum of the payload, go in as
    // well: copies of one machine, restored from a snapshot, may draw the same bits, and must not use one key and nonce
    // for two objects.
    void derive(const CipherObject& object, const Seal& seal, ObjectKey& derived) const {
        NamespaceKeys::Key of_namespace;
        of_namespaces->find_or_derive(key, object.name_space, of_namespace);
        std::vector<std::byte> context;
        append(context, std::as_bytes(std::span(&seal.aes_bits, 1)));
        append(context, std::as_bytes(std::span(seal.salt)));
        append(context, object.chunk_hash);
        append(context, object.earlier_parameters);
        derived.key_bytes = seal.aes_bits / 8;
        hkdf_expand_sha256(of_namespace.bytes, info_of("lmcache aesgcm 2 object", context),
                           std::span(derived.secret.bytes).first(derived.key_bytes + kNonceBytes));
    }
};

void hkdf_sha256(std::span<const std::byte> salt, std::span<const std::byte> key, std::span<const std::byte> info,
                 std::span<std::byte> derived) {
    static constexpr std::byte kNoSalt[kHashBytes] = {};
    Secret<kHashBytes> extracted;
    hmac(salt.empty() ? std::span<const std::byte>(kNoSalt) : salt, key, extracted.bytes);
    hkdf_expand_sha256(extracted.bytes, info, derived);
}

void hkdf_expand_sha256(std::span<const std::byte, 32> key, std::span<const std::byte> info,
                        std::span<std::byte> derived) {
    if (derived.size() > 255 * kHashBytes) throw CryptoError("HKDF gives at most 8160 bytes");
    Secret<kHashBytes> block;
    std::vector<std::byte> input;
    input.reserve(kHashBytes + info.size() + 1);
    std::size_t done = 0;
    for (std::uint8_t counter = 1; done < derived.size(); ++counter) {
        append(input, info);
        input.push_back(std::byte{counter});
        hmac(key, input, block.bytes);
        const std::size_t size = std::min(kHashBytes, derived.size() - done);
        std::memcpy(derived.data() + done, block.bytes.data(), size);
        done += size;
        ::explicit_bzero(input.data(), input.size());
        input.assign(block.bytes.begin(), block.bytes.end());
    }
    ::explicit_bzero(input.data(), input.size());
}

std::array<std::byte, kKeyIdBytes> master_key_id(const MasterKey& key) {
    std::array<std::byte, kKeyIdBytes> id;
    hkdf_sha256({}, key.bytes, info_of("lmcache aesgcm 1 key id", {}), id);
    return id;
}

void fill_random(std::span<std::byte> bytes) {
    while (!bytes.empty()) {
        const ssize_t drawn = ::getrandom(bytes.data(), bytes.size(), 0);
        if (drawn > 0) {
            bytes = bytes.subspan(static_cast<std::size_t>(drawn));
        } else if (errno != EINTR) {
            throw CryptoError("the kernel gives no random numbers");
        }
    }
}

ObjectCipher::ObjectCipher(std::vector<MasterKey> keys, unsigned aes_bits, void (*random)(std::span<std::byte>))
    : aes_bits_(aes_bits), random_(random), keys_(named(std::move(keys))) {
    if (aes_bits != 128 && aes_bits != 256) throw std::invalid_argument("aes_bits must be 128 or 256");
}

ObjectCipher::~ObjectCipher() = default;

std::shared_ptr<const ObjectCipher::Keys> ObjectCipher::named(std::vector<MasterKey> keys) {
    if (keys.empty() || keys.size() > kMaxMasterKeys) throw std::invalid_argument("there must be 1 to 16 master keys");
    auto all = std::make_shared<Keys>();
    all->reserve(keys.size());
    for (const MasterKey& key : keys) all->push_back({.key = key, .id = master_key_id(key)});
    return all;
}

void ObjectCipher::replace_keys(std::vector<MasterKey> keys) {
    auto all = named(std::move(keys));
    const MutexLock lock(mutex_);
    keys_.swap(all);
}

std::shared_ptr<const ObjectCipher::Keys> ObjectCipher::current() const {
    const MutexLock lock(mutex_);
    return keys_;
}

void ObjectCipher::seal(std::span<const std::byte> plain, std::span<std::byte> sealed, const CipherObject& object,
                        std::span<std::byte, kSealBytes> seal) const {
    if (plain.size() > kMaxSealedBytes || sealed.size() < plain.size())
        throw std::invalid_argument("an object is sealed into as many bytes as it has, below 64 GiB");
    const auto keys = current();
    Seal made{kSealVersion, aes_bits_, {}, {}, {}};
    std::memcpy(made.key_id, keys->front().id.data(), kKeyIdBytes);
    random_(std::as_writable_bytes(std::span(made.salt)));
    ObjectKey key;
    keys->front().derive(object, made, key);
    Pass pass(key, true);
    pass.authenticate(authenticated_data(object, made));
    pass.convert(plain, sealed.data());
    pass.tag(made.tag);
    std::memcpy(seal.data(), &made, sizeof made);
}

OpenFault ObjectCipher::open(std::span<const std::byte> sealed, std::span<std::byte> plain, const CipherObject& object,
                             std::span<const std::byte> seal) const {
    const auto refuse = [&](OpenFault fault) {
        std::ranges::fill(plain, std::byte{0});
        return fault;
    };
    if (seal.size() < sizeof(std::uint32_t)) return refuse(OpenFault::kForged);
    std::uint32_t version;
    std::memcpy(&version, seal.data(), sizeof version);
    if (version != kSealVersion) return refuse(OpenFault::kUnknownKey);
    Seal given;
    if (seal.size() != sizeof given || sealed.size() != plain.size() || sealed.size() > kMaxSealedBytes)
        return refuse(OpenFault::kForged);
    std::memcpy(&given, seal.data(), sizeof given);
    if (given.aes_bits != 128 && given.aes_bits != 256) return refuse(OpenFault::kForged);
    const auto keys = current();
    const auto known = std::ranges::find_if(
        *keys, [&](const NamedKey& key) { return std::memcmp(key.id.data(), given.key_id, kKeyIdBytes) == 0; });
    if (known == keys->end()) return refuse(OpenFault::kUnknownKey);
    ObjectKey key;
    known->derive(object, given, key);
    Pass pass(key, false);
    pass.authenticate(authenticated_data(object, given));
    pass.convert(sealed, plain.data());
    return pass.authenticates(given.tag) ? OpenFault::kNone : refuse(OpenFault::kForged);
}

}  // namespace lmcache
