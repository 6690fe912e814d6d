// The few calls of OpenSSL's libcrypto that encryption needs, found at run time, as those of tls_library.h.
//
// Names, signatures and numbers are those of the public interface of OpenSSL 1.1.1 and 3.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace lmcache {

// What the library refuses, in a sentence without its end.
class CryptoError : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

using CipherContextHandle = struct CipherContextTag*;
using CipherHandle = const struct CipherTag*;
using DigestHandle = const struct DigestTag*;

// (result, member, exported symbol, parameters)
#define LMCACHE_CRYPTO_CALLS(CALL)                                                                                     \
    CALL(CipherContextHandle, context_new, "EVP_CIPHER_CTX_new", ())                                                   \
    CALL(void, context_free, "EVP_CIPHER_CTX_free", (CipherContextHandle))                                             \
    CALL(int, context_control, "EVP_CIPHER_CTX_ctrl", (CipherContextHandle, int, int, void*))                          \
    CALL(CipherHandle, aes_128_gcm, "EVP_aes_128_gcm", ())                                                             \
    CALL(CipherHandle, aes_256_gcm, "EVP_aes_256_gcm", ())                                                             \
    CALL(int, begin, "EVP_CipherInit_ex",                                                                              \
         (CipherContextHandle, CipherHandle, void* engine, const unsigned char* key, const unsigned char* nonce, int)) \
    CALL(int, update, "EVP_CipherUpdate",                                                                              \
         (CipherContextHandle, unsigned char* out, int* written, const unsigned char* in, int size))                   \
    CALL(int, finish, "EVP_CipherFinal_ex", (CipherContextHandle, unsigned char* out, int* written))                   \
    CALL(DigestHandle, sha256, "EVP_sha256", ())                                                                       \
    CALL(unsigned char*, hmac, "HMAC",                                                                                 \
         (DigestHandle, const void* key, int key_bytes, const unsigned char* data, std::size_t size,                   \
          unsigned char* code, unsigned* code_bytes))                                                                  \
    CALL(void, clear_errors, "ERR_clear_error", ())

struct CryptoLibrary {
    // Opens the first library that is there, once in a process. Throws CryptoError.
    static const CryptoLibrary& instance();

#define LMCACHE_CRYPTO_MEMBER(result, member, symbol, parameters) result(*member) parameters = nullptr;
    LMCACHE_CRYPTO_CALLS(LMCACHE_CRYPTO_MEMBER)
#undef LMCACHE_CRYPTO_MEMBER

private:
    CryptoLibrary();
};

// "" or why the machine's libcrypto cannot be used.
std::string crypto_refusal();

}  // namespace lmcache
