// The addresses of a host name within a deadline. getaddrinfo has none: with name servers that do not answer it takes
// half a minute, and what the system's configuration adds may take longer.
#pragma once

#include <netdb.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace lmcache {

using HostAddresses = std::shared_ptr<const addrinfo>;
using HostResolver = int (*)(const char* host, const char* port, const addrinfo* hints, addrinfo** found);

struct HostLookupResult {
    enum class Kind : std::uint8_t { kFound, kRefused, kTooLate, kStopped, kTooMany };
    Kind kind = Kind::kTooLate;
    HostAddresses addresses;  // of kFound
    int error = 0;            // of kRefused, as gai_strerror takes it
};

// Names under way in the process. One that stands still keeps its thread until the resolver returns.
inline constexpr std::size_t kMaxHostLookups = 64;

// An address in digits asks nobody. All callers that wait for the same name and port share one thread, which goes on
// when they have left. `stop_fd` that becomes readable ends the wait. Throws std::system_error when the machine refuses
// a thread or a descriptor.
HostLookupResult look_up_host(const std::string& host, std::uint16_t port, int stop_fd,
                              std::chrono::steady_clock::time_point deadline, HostResolver resolver = ::getaddrinfo);

}  // namespace lmcache
