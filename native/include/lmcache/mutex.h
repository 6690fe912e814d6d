// Mutexes whose use clang's thread-safety analysis checks (-Wthread-safety). Other compilers see plain mutexes.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define LMCACHE_ATTRIBUTE(x) __attribute__((x))
#else
#define LMCACHE_ATTRIBUTE(x)
#endif

#define LMCACHE_CAPABILITY(name) LMCACHE_ATTRIBUTE(capability(name))
#define LMCACHE_SCOPED_CAPABILITY LMCACHE_ATTRIBUTE(scoped_lockable)
// Of a member: touched only while the mutex is held.
#define LMCACHE_GUARDED_BY(mutex) LMCACHE_ATTRIBUTE(guarded_by(mutex))
// Of a function: the caller holds the mutex, takes it by the call, gives it up by the call, does not hold it.
#define LMCACHE_REQUIRES(...) LMCACHE_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define LMCACHE_ACQUIRE(...) LMCACHE_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define LMCACHE_RELEASE(...) LMCACHE_ATTRIBUTE(release_capability(__VA_ARGS__))
#define LMCACHE_EXCLUDES(...) LMCACHE_ATTRIBUTE(locks_excluded(__VA_ARGS__))
// Of a function: says that the caller holds the mutex, where the analysis does not see it (in a lambda).
#define LMCACHE_ASSERTS(...) LMCACHE_ATTRIBUTE(assert_capability(__VA_ARGS__))
// Of a function whose locking the analysis cannot follow.
#define LMCACHE_NO_THREAD_SAFETY_ANALYSIS LMCACHE_ATTRIBUTE(no_thread_safety_analysis)

namespace lmcache {

class LMCACHE_CAPABILITY("mutex") Mutex {
public:
    void lock() LMCACHE_ACQUIRE() { mutex_.lock(); }
    void unlock() LMCACHE_RELEASE() { mutex_.unlock(); }
    void assert_held() const LMCACHE_ASSERTS(this) {}

private:
    friend class Condition;
    std::mutex mutex_;
};

// Holds a mutex until the end of its scope, less the time between unlock() and lock().
template <typename M>
class LMCACHE_SCOPED_CAPABILITY MutexLock {
public:
    explicit MutexLock(M& mutex) LMCACHE_ACQUIRE(mutex) : mutex_(mutex) { mutex.lock(); }
    ~MutexLock() LMCACHE_RELEASE() {
        if (held_) mutex_.unlock();
    }
    MutexLock(const MutexLock&) = delete;
    MutexLock& operator=(const MutexLock&) = delete;

    void unlock() LMCACHE_RELEASE() {
        held_ = false;
        mutex_.unlock();
    }
    void lock() LMCACHE_ACQUIRE() {
        mutex_.lock();
        held_ = true;
    }

private:
    M& mutex_;
    bool held_ = true;
};

// A condition variable. Waits may end without a notification: call them in a loop that looks at what is awaited.
class Condition {
public:
    void wait(Mutex& mutex) LMCACHE_REQUIRES(mutex) {
        std::unique_lock<std::mutex> held(mutex.mutex_, std::adopt_lock);
        condition_.wait(held);
        held.release();
    }
    // False when the deadline has passed.
    bool wait_until(Mutex& mutex, std::chrono::steady_clock::time_point deadline) LMCACHE_REQUIRES(mutex) {
        std::unique_lock<std::mutex> held(mutex.mutex_, std::adopt_lock);
        const bool notified = condition_.wait_until(held, deadline) == std::cv_status::no_timeout;
        held.release();
        return notified;
    }
    void notify_one() noexcept { condition_.notify_one(); }
    void notify_all() noexcept { condition_.notify_all(); }

private:
    std::condition_variable condition_;
};

}  // namespace lmcache
