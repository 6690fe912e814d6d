// A mutex whose holder can let waiters go first during long work, and that can be closed for good. Unlocking and
// locking again would not do for the first: the thread that holds a std::mutex gets it back before a sleeping waiter
// has woken up.
#pragma once

#include <atomic>
#include <stdexcept>
#include <thread>

#include "lmcache/mutex.h"

namespace lmcache {

// What the mutex guards is not to be touched any more.
struct Closed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class LMCACHE_CAPABILITY("mutex") YieldingMutex {
public:
    // Throws Closed once close() has returned.
    void lock() LMCACHE_ACQUIRE() LMCACHE_NO_THREAD_SAFETY_ANALYSIS {
        lock_even_closed();
        if (!closed_) return;
        mutex_.unlock();
        throw Closed("closed");
    }
    void unlock() LMCACHE_RELEASE() LMCACHE_NO_THREAD_SAFETY_ANALYSIS { mutex_.unlock(); }
    void assert_held() const LMCACHE_ASSERTS(this) {}

    // Waits for the holder. From then on nobody gets the mutex, nor gets it back while it yields. Idempotent.
    void close() LMCACHE_NO_THREAD_SAFETY_ANALYSIS {
        lock_even_closed();
        closed_ = true;
        mutex_.unlock();
    }

    // Called by the holder at a point where what it guards is consistent: those who wait now go first. Bounded, because
    // threads that come and come again must not stop the work for ever. The holder still holds it when this throws
    // Closed.
    void yield_to_waiters() LMCACHE_REQUIRES(this) LMCACHE_NO_THREAD_SAFETY_ANALYSIS {
        constexpr int kMaxYields = 1000;
        if (waiting_.load(std::memory_order_relaxed) == 0) return;
        mutex_.unlock();
        for (int i = 0; i < kMaxYields && waiting_.load(std::memory_order_relaxed) != 0; ++i) std::this_thread::yield();
        mutex_.lock();
        if (closed_) throw Closed("closed");
    }

private:
    void lock_even_closed() LMCACHE_ACQUIRE(mutex_) {
        waiting_.fetch_add(1, std::memory_order_relaxed);
        mutex_.lock();
        waiting_.fetch_sub(1, std::memory_order_relaxed);
    }

    Mutex mutex_;
    bool closed_ LMCACHE_GUARDED_BY(mutex_) = false;
    std::atomic<int> waiting_{0};
};

}  // namespace lmcache
