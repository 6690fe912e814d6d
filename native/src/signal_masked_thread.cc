#include "lmcache/signal_masked_thread.h"

namespace lmcache {

SignalMask::SignalMask() {
    sigset_t all;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
}

SignalMask::~SignalMask() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

}  // namespace lmcache
