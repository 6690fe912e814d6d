// A mutex whose holder can let others in during long work, and that can be closed for good. Unlocking and locking again
// would not do for the first: the thread that holds a std::mutex gets it back before a sleeping waiter has woken up.
#pragma once

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace lmcache {

// What the mutex guards is not to be touched any more.
struct Closed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class CourteousMutex {
public:
    // Closed once `close` has returned.
    void lock() {
        lock_regardless();
        if (!closed_) return;
        mutex_.unlock();
        throw Closed("closed");
    }
    void unlock() { mutex_.unlock(); }

    // Waits for the holder. From then on nobody gets the mutex, nor gets it back while it lets others in. Idempotent.
    void close() {
        lock_regardless();
        closed_ = true;
        mutex_.unlock();
    }

    // Called by the holder at a point where what it guards is consistent: those who wait now go first. Bounded, because
    // threads that come and come again must not stop the work for ever. The holder still holds it when this throws
    // Closed.
    void let_others_in() {
        constexpr int kMaxYields = 1000;
        if (waiting_.load(std::memory_order_relaxed) == 0) return;
        mutex_.unlock();
        for (int i = 0; i < kMaxYields && waiting_.load(std::memory_order_relaxed) != 0; ++i) std::this_thread::yield();
        mutex_.lock();
        if (closed_) throw Closed("closed");
    }

private:
    void lock_regardless() {
        waiting_.fetch_add(1, std::memory_order_relaxed);
        mutex_.lock();
        waiting_.fetch_sub(1, std::memory_order_relaxed);
    }

    std::mutex mutex_;
    bool closed_ = false;  // guarded by mutex_
    std::atomic<int> waiting_{0};
};

}  // namespace lmcache
