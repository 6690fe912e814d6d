#include "lmcache/tls_library.h"

#include <arpa/inet.h>

#include "lmcache/shared_library.h"

namespace lmcache {
namespace {

constexpr int kSetMinimumVersion = 123, kSetMode = 33, kSetHostName = 55;  // SSL_CTRL_...
constexpr long kTls12 = 0x0303;
constexpr long kPartialWrites = 1, kMovingBuffers = 2;
constexpr int kVerifyPeer = 1, kPemFile = 1;

bool is_address(const std::string& host) {
    unsigned char parsed[sizeof(in6_addr)];
    return ::inet_pton(AF_INET, host.c_str(), parsed) == 1 || ::inet_pton(AF_INET6, host.c_str(), parsed) == 1;
}

}  // namespace

TlsLibrary::TlsLibrary() {
    const SharedLibrary library({"libssl.so.3", "libssl.so.1.1", "libssl.so"});
    if (!library.is_open()) throw TlsError("OpenSSL is not installed (libssl.so.3 or libssl.so.1.1 cannot be loaded)");
#define LMCACHE_FIND_CALL(result, member, symbol, parameters) library.need<TlsError>(member, symbol);
    LMCACHE_TLS_CALLS(LMCACHE_FIND_CALL)
#undef LMCACHE_FIND_CALL
}

const TlsLibrary& TlsLibrary::instance() {
    static const TlsLibrary library;
    return library;
}

std::string TlsLibrary::last_error() const {
    const unsigned long code = take_error();
    if (code == 0) return {};
    char text[256];
    error_text(code, text, sizeof text);
    clear_errors();
    return text;
}

TlsContext::TlsContext(const TlsOptions& options)
    : library_(TlsLibrary::instance()), server_name_(options.server_name) {
    const auto& tls = library_;
    tls.clear_errors();
    context_ = tls.context_new(tls.client_method());
    if (context_ == nullptr) throw TlsError("OpenSSL cannot make a context: " + tls.last_error());
    const auto refuse = [&](const std::string& sentence) {
        const std::string reason = tls.last_error();
        tls.context_free(context_);
        throw TlsError(sentence + (reason.empty() ? "" : ": " + reason));
    };
    tls.context_control(context_, kSetMinimumVersion, kTls12, nullptr);
    tls.context_control(context_, kSetMode, kPartialWrites | kMovingBuffers, nullptr);
    tls.context_set_verify(context_, kVerifyPeer, nullptr);
    if (options.authorities.empty()) {
        if (tls.context_default_paths(context_) != 1) refuse("the system's certificates cannot be read");
    } else if (tls.context_load_authorities(context_, options.authorities.c_str(), nullptr) != 1) {
        refuse("no certificates can be read from " + options.authorities);
    }
    if (options.certificate.empty()) return;
    // Without this the library asks whoever sits at the terminal, and waits.
    tls.context_set_passphrase(context_, [](char*, int, int, void*) { return -1; });
    if (tls.context_use_certificate(context_, options.certificate.c_str()) != 1)
        refuse("no certificate can be read from " + options.certificate);
    // It also compares the key with the certificate.
    if (tls.context_use_key(context_, options.key.c_str(), kPemFile) != 1)
        refuse("no key of that certificate, without a passphrase, can be read from " + options.key);
}

TlsContext::~TlsContext() { library_.context_free(context_); }

TlsSessionHandle TlsContext::new_session(int fd, const std::string& host) const {
    const auto& tls = library_;
    const std::string& name = server_name_.empty() ? host : server_name_;
    tls.clear_errors();
    const TlsSessionHandle session = tls.session_new(context_);
    if (session == nullptr) throw TlsError("OpenSSL cannot make a session: " + tls.last_error());
    bool ready = tls.session_set_fd(session, fd) == 1;
    if (is_address(name)) {
        ready = ready && tls.parameters_set_address(tls.session_parameters(session), name.c_str()) == 1;
    } else {
        ready = ready && tls.session_set_host(session, name.c_str()) == 1;
        // The library copies it.
        ready = ready && tls.session_control(session, kSetHostName, 0, const_cast<char*>(name.c_str())) == 1;
    }
    if (!ready) {
        const std::string reason = tls.last_error();
        tls.session_free(session);
        throw TlsError("OpenSSL cannot use the name " + name + ": " + reason);
    }
    return session;
}

}  // namespace lmcache
