// Survives SIGBUS, which a page of a mapping raises when the medium cannot give it, and which by default ends the
// process.
#pragma once

#include <csetjmp>
#include <cstddef>
#include <cstdint>

namespace lmcache {

// Installs a handler of SIGBUS before the one that is installed, to which signals outside of guarded accesses are
// passed on. Call again after somebody else may have installed a handler. Throws std::system_error.
void install_sigbus_handler();

namespace sigbus_guard {

struct Guard {
    sigjmp_buf jump;
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    Guard* outer = nullptr;
};

// The guard of this thread; nullptr outside guarded accesses.
Guard*& current();

}  // namespace sigbus_guard

// Calls `access` and returns true, or false when a page in [begin, begin + size_bytes) could not be read or written:
// then `access` was left in the middle. It must own nothing that a destructor releases, and take no lock.
template <typename Access>
[[nodiscard]] bool guarded(const std::byte* begin, std::size_t size_bytes, const Access& access) {
    sigbus_guard::Guard guard;
    guard.begin = reinterpret_cast<std::uintptr_t>(begin);
    guard.end = guard.begin + size_bytes;
    guard.outer = sigbus_guard::current();
    if (sigsetjmp(guard.jump, 1) != 0) {
        sigbus_guard::current() = sigbus_guard::current()->outer;
        return false;
    }
    sigbus_guard::current() = &guard;
    access();
    sigbus_guard::current() = guard.outer;
    return true;
}

}  // namespace lmcache
