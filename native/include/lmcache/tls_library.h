// The few calls of OpenSSL that a client needs, found at run time: neither its headers nor the library are needed to
// build, or to run without TLS.
//
// Names, signatures and numbers are those of the public interface of OpenSSL 1.1.1 and 3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace lmcache {

// What the library or a certificate file refuses, in a sentence without its end.
class TlsError : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

using TlsMethod = const struct TlsMethodHandle*;
using TlsContextHandle = struct TlsContextTag*;
using TlsSessionHandle = struct TlsSessionTag*;
using TlsVerifyParameters = struct TlsVerifyParametersTag*;

// (result, member, exported symbol, parameters)
#define LMCACHE_TLS_CALLS(CALL)                                                                               \
    CALL(TlsMethod, client_method, "TLS_client_method", ())                                                   \
    CALL(TlsContextHandle, context_new, "SSL_CTX_new", (TlsMethod))                                           \
    CALL(void, context_free, "SSL_CTX_free", (TlsContextHandle))                                              \
    CALL(long, context_control, "SSL_CTX_ctrl", (TlsContextHandle, int, long, void*))                         \
    CALL(void, context_set_verify, "SSL_CTX_set_verify", (TlsContextHandle, int, void*))                      \
    CALL(int, context_default_paths, "SSL_CTX_set_default_verify_paths", (TlsContextHandle))                  \
    CALL(int, context_load_authorities, "SSL_CTX_load_verify_locations",                                      \
         (TlsContextHandle, const char* file, const char* folder))                                            \
    CALL(int, context_use_certificate, "SSL_CTX_use_certificate_chain_file", (TlsContextHandle, const char*)) \
    CALL(int, context_use_key, "SSL_CTX_use_PrivateKey_file", (TlsContextHandle, const char*, int type))      \
    CALL(void, context_set_passphrase, "SSL_CTX_set_default_passwd_cb",                                       \
         (TlsContextHandle, int (*)(char*, int, int, void*)))                                                 \
    CALL(TlsSessionHandle, session_new, "SSL_new", (TlsContextHandle))                                        \
    CALL(void, session_free, "SSL_free", (TlsSessionHandle))                                                  \
    CALL(int, session_set_fd, "SSL_set_fd", (TlsSessionHandle, int))                                          \
    CALL(long, session_control, "SSL_ctrl", (TlsSessionHandle, int, long, void*))                             \
    CALL(int, session_set_host, "SSL_set1_host", (TlsSessionHandle, const char*))                             \
    CALL(TlsVerifyParameters, session_parameters, "SSL_get0_param", (TlsSessionHandle))                       \
    CALL(int, parameters_set_address, "X509_VERIFY_PARAM_set1_ip_asc", (TlsVerifyParameters, const char*))    \
    CALL(int, connect, "SSL_connect", (TlsSessionHandle))                                                     \
    CALL(int, read, "SSL_read", (TlsSessionHandle, void*, int))                                               \
    CALL(int, write, "SSL_write", (TlsSessionHandle, const void*, int))                                       \
    CALL(int, session_error, "SSL_get_error", (TlsSessionHandle, int))                                        \
    CALL(long, verify_result, "SSL_get_verify_result", (TlsSessionHandle))                                    \
    CALL(const char*, verify_text, "X509_verify_cert_error_string", (long))                                   \
    CALL(unsigned long, take_error, "ERR_get_error", ())                                                      \
    CALL(void, clear_errors, "ERR_clear_error", ())                                                           \
    CALL(void, error_text, "ERR_error_string_n", (unsigned long, char*, std::size_t))

struct TlsLibrary {
    // Opens the first library that is there, once in a process. Throws TlsError.
    static const TlsLibrary& instance();

#define LMCACHE_TLS_MEMBER(result, member, symbol, parameters) result(*member) parameters = nullptr;
    LMCACHE_TLS_CALLS(LMCACHE_TLS_MEMBER)
#undef LMCACHE_TLS_MEMBER

    // The oldest error of this thread in words; forgets the others. "" where there is none.
    std::string last_error() const;

private:
    TlsLibrary();
};

struct TlsOptions {
    bool enabled = false;
    std::string authorities;  // file of PEM certificates; "": those of the system
    std::string certificate;  // of the client; "": none
    std::string key;
    std::string server_name;  // that certificates must have, in place of the host's name
};

// What all sessions of a client share. Thread-safe.
class TlsContext {
public:
    // Throws TlsError: no library, a file that cannot be read, a key that does not belong to its certificate.
    explicit TlsContext(const TlsOptions& options);
    ~TlsContext();
    TlsContext(const TlsContext&) = delete;
    TlsContext& operator=(const TlsContext&) = delete;

    const TlsLibrary& library() const { return library_; }

    // A session over a connected socket, before its handshake, that will accept a certificate of that host alone.
    // Throws TlsError.
    TlsSessionHandle new_session(int fd, const std::string& host) const;

private:
    const TlsLibrary& library_;
    const std::string server_name_;
    TlsContextHandle context_ = nullptr;
};

}  // namespace lmcache
