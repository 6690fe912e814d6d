// Accesses to a mapping that may fail: a page that the medium cannot give raises SIGBUS, which by default ends the
// process.
#pragma once

#include <csetjmp>
#include <cstddef>
#include <cstdint>

namespace lmcache {

// Installs the handler of SIGBUS, in front of whatever is installed. Signals that are not from a guarded access go on
// to that. Call again after somebody else may have installed a handler. Throws std::system_error.
void install_bus_handler();

namespace bus_guard {

struct Guard {
    sigjmp_buf jump;
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    Guard* outer = nullptr;
};

// Of this thread; nullptr outside guarded accesses.
Guard*& current();

}  // namespace bus_guard

// Calls `access` and returns true, or false when it met a page in [begin, begin + size_bytes) that could not be had:
// then it was left in the middle. It must hold nothing that a destructor gives back, and take no lock.
template <typename Access>
[[nodiscard]] bool guarded(const std::byte* begin, std::size_t size_bytes, const Access& access) {
    bus_guard::Guard guard;
    guard.begin = reinterpret_cast<std::uintptr_t>(begin);
    guard.end = guard.begin + size_bytes;
    guard.outer = bus_guard::current();
    if (sigsetjmp(guard.jump, 1) != 0) {
        bus_guard::current() = bus_guard::current()->outer;
        return false;
    }
    bus_guard::current() = &guard;
    access();
    bus_guard::current() = guard.outer;
    return true;
}

}  // namespace lmcache
