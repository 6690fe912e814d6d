#include "lmcache/crypto_library.h"

#include <dlfcn.h>

#include <type_traits>

namespace lmcache {
namespace {

constexpr const char* kLibraries[] = {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"};

}  // namespace

CryptoLibrary::CryptoLibrary() {
    void* handle = nullptr;
    const char* name = "";
    for (const char* library : kLibraries) {
        handle = ::dlopen(library, RTLD_NOW | RTLD_LOCAL);
        name = library;
        if (handle != nullptr) break;
    }
    if (handle == nullptr)
        throw CryptoError("OpenSSL is not installed (libcrypto.so.3 or libcrypto.so.1.1 cannot be loaded)");
    const auto find = [&](auto& call, const char* symbol) {
        call = reinterpret_cast<std::remove_reference_t<decltype(call)>>(::dlsym(handle, symbol));
        if (call == nullptr) throw CryptoError(std::string(name) + " is too old: it lacks " + symbol);
    };
#define LMCACHE_FIND_CALL(result, member, symbol, parameters) find(member, symbol);
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
