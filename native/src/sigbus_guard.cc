#include "lmcache/sigbus_guard.h"

#include <signal.h>

#include <cerrno>
#include <system_error>

#include "lmcache/mutex.h"

namespace lmcache {
namespace {

Mutex install_mutex;
struct sigaction previous{};  // written under install_mutex, before the handler that reads it is installed

void pass_on(int signal, siginfo_t* info, void* context) {
    if ((previous.sa_flags & SA_SIGINFO) != 0 && previous.sa_sigaction != nullptr) {
        previous.sa_sigaction(signal, info, context);
    } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
        previous.sa_handler(signal);
    } else {
        // On return the access is repeated, and ends the process as it would without this handler.
        struct sigaction standard{};
        standard.sa_handler = SIG_DFL;
        sigaction(SIGBUS, &standard, nullptr);
    }
}

void on_bus_error(int signal, siginfo_t* info, void* context) {
    sigbus_guard::Guard* const guard = sigbus_guard::current();
    const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
    if (guard != nullptr && address >= guard->begin && address < guard->end) siglongjmp(guard->jump, 1);
    pass_on(signal, info, context);
}

}  // namespace

namespace sigbus_guard {

Guard*& current() {
    static thread_local Guard* guard = nullptr;
    return guard;
}

}  // namespace sigbus_guard

void install_sigbus_handler() {
    const MutexLock lock(install_mutex);
    struct sigaction installed{};
    if (sigaction(SIGBUS, nullptr, &installed) != 0)
        throw std::system_error(errno, std::generic_category(), "sigaction");
    if ((installed.sa_flags & SA_SIGINFO) != 0 && installed.sa_sigaction == on_bus_error) return;
    previous = installed;
    struct sigaction ours{};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    if (sigaction(SIGBUS, &ours, nullptr) != 0) throw std::system_error(errno, std::generic_category(), "sigaction");
}

}  // namespace lmcache
