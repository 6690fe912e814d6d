#include "lmcache/host_lookup.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <map>
#include <thread>
#include <utility>

#include "lmcache/mutex.h"
#include "lmcache/signal_masked_thread.h"
#include "lmcache/unique_fd.h"

namespace lmcache {
namespace {

using Kind = HostLookupResult::Kind;

HostLookupResult resolved(const std::string& host, const std::string& port, int flags, HostResolver resolver) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags;
    addrinfo* list = nullptr;
    if (const int error = resolver(host.c_str(), port.c_str(), &hints, &list); error != 0)
        return {Kind::kRefused, nullptr, error};
    return {Kind::kFound,
            HostAddresses(list,
                          [](const addrinfo* first) {
                              if (first != nullptr) ::freeaddrinfo(const_cast<addrinfo*>(first));
                          }),
            0};
}

struct Lookup {
    EventFd ended;
    Mutex mutex;
    HostLookupResult result LMCACHE_GUARDED_BY(mutex);
};

class Lookups {
public:
    // The one of that name and port, begun where there is none. nullptr: too many are under way.
    std::shared_ptr<Lookup> join(const std::string& host, const std::string& port, HostResolver resolver) {
        const std::pair key(host, port);
        MutexLock lock(mutex_);
        if (const auto found = running_.find(key); found != running_.end()) return found->second;
        if (running_.size() >= kMaxHostLookups) return nullptr;
        auto lookup = std::make_shared<Lookup>();
        const SignalMask mask;
        std::thread([this, key, lookup, resolver] { run(key, *lookup, resolver); }).detach();
        running_.emplace(key, lookup);
        return lookup;
    }

private:
    using Key = std::pair<std::string, std::string>;

    void run(const Key& key, Lookup& lookup, HostResolver resolver) {
        HostLookupResult result = resolved(key.first, key.second, AI_ADDRCONFIG, resolver);
        {
            MutexLock lock(mutex_);  // held by join() until it has entered what it began
            running_.erase(key);
        }
        {
            MutexLock lock(lookup.mutex);
            lookup.result = std::move(result);
        }
        lookup.ended.signal();  // and never reset: everybody who waits sees it
    }

    Mutex mutex_;
    std::map<Key, std::shared_ptr<Lookup>> running_ LMCACHE_GUARDED_BY(mutex_);
};

int milliseconds_until(std::chrono::steady_clock::time_point deadline) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, INT_MAX));
}

}  // namespace

HostLookupResult look_up_host(const std::string& host, std::uint16_t port, int stop_fd,
                              std::chrono::steady_clock::time_point deadline, HostResolver resolver) {
    const std::string port_text = std::to_string(port);
    if (HostLookupResult numeric = resolved(host, port_text, AI_NUMERICHOST, ::getaddrinfo);
        numeric.kind == Kind::kFound)
        return numeric;
    static Lookups& lookups = *new Lookups;  // never destroyed: a thread may be in the resolver at the process's end
    const std::shared_ptr<Lookup> lookup = lookups.join(host, port_text, resolver);
    if (lookup == nullptr) return {Kind::kTooMany, nullptr, 0};
    pollfd waiting[2] = {{lookup->ended.get(), POLLIN, 0}, {stop_fd, POLLIN, 0}};
    for (;;) {
        const int ready = ::poll(waiting, 2, milliseconds_until(deadline));
        if (ready < 0 && errno == EINTR) continue;
        if (ready < 0) return {Kind::kRefused, nullptr, EAI_SYSTEM};
        if (ready == 0) return {Kind::kTooLate, nullptr, 0};
        if (waiting[1].revents != 0) return {Kind::kStopped, nullptr, 0};
        MutexLock lock(lookup->mutex);
        return lookup->result;
    }
}

}  // namespace lmcache
