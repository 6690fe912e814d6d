// A mutex whose holder can let others in during long work. Unlocking and locking again would not do: the thread that
// holds a std::mutex gets it back before a sleeping waiter has woken up.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>

namespace lmcache {

class CourteousMutex {
public:
    void lock() {
        waiting_.fetch_add(1, std::memory_order_relaxed);
        mutex_.lock();
        waiting_.fetch_sub(1, std::memory_order_relaxed);
    }
    void unlock() { mutex_.unlock(); }

    // Called by the holder at a point where what it guards is consistent: those who wait now go first. Bounded, because
    // threads that come and come again must not stop the work for ever.
    void let_others_in() {
        constexpr int kMaxYields = 1000;
        if (waiting_.load(std::memory_order_relaxed) == 0) return;
        mutex_.unlock();
        for (int i = 0; i < kMaxYields && waiting_.load(std::memory_order_relaxed) != 0; ++i) std::this_thread::yield();
        mutex_.lock();
    }

private:
    std::mutex mutex_;
    std::atomic<int> waiting_{0};
};

}  // namespace lmcache
