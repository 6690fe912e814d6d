// Names that are not resolved for a while: nobody waits beyond a deadline, and threads do not add up.
#include "lmcache/host_lookup.h"

#include <atomic>
#include <cstring>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "lmcache/unique_fd.h"

using namespace std::chrono_literals;
using lmcache::look_up_host;
using Kind = lmcache::HostLookupResult::Kind;

namespace {

std::atomic<bool> held{false};
std::atomic<int> asked{0}, ended{0};

auto in(std::chrono::milliseconds time) { return std::chrono::steady_clock::now() + time; }

// Knows every name but those that begin with "no", and stands still while it is held.
int resolver(const char* host, const char* port, const addrinfo* hints, addrinfo** found) {
    ++asked;
    held.wait(true);
    const int error = std::strncmp(host, "no", 2) == 0 ? EAI_NONAME : ::getaddrinfo("127.0.0.1", port, hints, found);
    ++ended;
    return error;
}

void release() {
    held = false;
    held.notify_all();
    while (ended != asked) std::this_thread::yield();
}

TEST_CASE(an_address_in_digits_asks_nobody) {
    const lmcache::EventFd stop;
    asked = ended = 0;
    for (const char* host : {"127.0.0.1", "::1"}) CHECK(look_up_host(host, 1, stop.get(), in(0ms), resolver).addresses);
    CHECK(asked == 0);
}

TEST_CASE(names_are_found_or_refused) {
    const lmcache::EventFd stop;
    const auto found = look_up_host("kv.test", 7, stop.get(), in(60s), resolver);
    CHECK(found.kind == Kind::kFound && found.addresses->ai_family == AF_INET);
    const auto refused = look_up_host("none.test", 7, stop.get(), in(60s), resolver);
    CHECK(refused.kind == Kind::kRefused && refused.error == EAI_NONAME && !refused.addresses);
}

TEST_CASE(one_that_stands_still_costs_its_deadline_and_one_thread) {
    lmcache::EventFd stop;
    asked = ended = 0;
    held = true;
    for (int i = 0; i < 20; ++i)
        CHECK(look_up_host("slow.test", 7, stop.get(), in(1ms), resolver).kind == Kind::kTooLate);
    while (asked == 0) std::this_thread::yield();
    CHECK(asked == 1);
    auto waiting = std::async(std::launch::async,
                              [&] { return look_up_host("slow.test", 7, stop.get(), in(60s), resolver).kind; });
    auto stopped = std::async(std::launch::async, [&] {
        lmcache::EventFd own;
        own.signal();
        return look_up_host("slow.test", 7, own.get(), in(60s), resolver).kind;
    });
    CHECK(stopped.get() == Kind::kStopped);
    release();
    CHECK(waiting.get() == Kind::kFound);
    CHECK(look_up_host("slow.test", 7, stop.get(), in(60s), resolver).kind == Kind::kFound);
}

TEST_CASE(names_under_way_have_a_limit) {
    const lmcache::EventFd stop;
    asked = ended = 0;
    held = true;
    for (std::size_t i = 0; i < lmcache::kMaxHostLookups; ++i)
        CHECK(look_up_host("host" + std::to_string(i), 7, stop.get(), in(0ms), resolver).kind == Kind::kTooLate);
    CHECK(look_up_host("another", 7, stop.get(), in(60s), resolver).kind == Kind::kTooMany);
    release();
    while (look_up_host("another", 7, stop.get(), in(60s), resolver).kind == Kind::kTooMany) std::this_thread::yield();
}

}  // namespace
