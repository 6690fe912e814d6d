// The kind of thread that this library starts: it leaves the signals of the process to the threads that the process has
// itself. Only signals that a fault of the thread raises reach it.
#pragma once

#include <signal.h>

#include <thread>
#include <utility>

namespace lmcache {

// Signals of the calling thread, which a thread that it starts inherits, until the end of the scope.
class SignalMask {
public:
    SignalMask();
    ~SignalMask();
    SignalMask(const SignalMask&) = delete;
    SignalMask& operator=(const SignalMask&) = delete;

private:
    sigset_t before_;
};

class SignalMaskedThread {
public:
    // Runs `work()`. `name`: at most 15 characters. Throws std::system_error when the machine refuses a thread.
    template <typename Work>
    SignalMaskedThread(const char* name, Work&& work) {
        const SignalMask mask;
        thread_ = std::jthread(std::forward<Work>(work));
        pthread_setname_np(thread_.native_handle(), name);
    }
    // Waits for its end.
    ~SignalMaskedThread() = default;
    SignalMaskedThread(SignalMaskedThread&&) noexcept = default;
    SignalMaskedThread& operator=(SignalMaskedThread&&) = delete;

private:
    std::jthread thread_;
};

}  // namespace lmcache
