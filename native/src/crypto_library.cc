#include "lmcache/crypto_library.h"

#include "lmcache/shared_library.h"

namespace lmcache {

CryptoLibrary::CryptoLibrary() {
    const SharedLibrary library({"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"});
    if (!library.is_open())
        throw CryptoError("OpenSSL is not installed (libcrypto.so.3 or libcrypto.so.1.1 cannot be loaded)");
#define LMCACHE_FIND_CALL(result, member, symbol, parameters) library.need<CryptoError>(member, symbol);
    LMCACHE_CRYPTO_CALLS(LMCACHE_FIND_CALL)
#undef LMCACHE_FIND_CALL
}

const CryptoLibrary& CryptoLibrary::instance() {
    static const CryptoLibrary library;
    return library;
}

std::string crypto_refusal() {
    try {
        CryptoLibrary::instance();
        return {};
    } catch (const CryptoError& error) {
        return error.what();
    }
}

}  // namespace lmcache
