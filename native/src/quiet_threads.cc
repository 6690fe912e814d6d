#include "lmcache/quiet_threads.h"

#include <pthread.h>
#include <signal.h>

namespace lmcache {
namespace {

// Of this thread; a new one inherits them.
class SignalsBlocked {
public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&all, fault);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

private:
    sigset_t before_;
};

}  // namespace

void start_quiet_threads(std::vector<std::thread>& threads, std::size_t count, const char* name,
                         const std::function<void()>& work) {
    const SignalsBlocked blocked;
    for (std::size_t i = 0; i < count; ++i) {
        threads.emplace_back(work);
        pthread_setname_np(threads.back().native_handle(), name);
    }
}

}  // namespace lmcache
