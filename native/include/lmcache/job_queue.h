// Jobs of numbered elements: taken in pieces by several threads, ended in any order, reported by an eventfd.
//
// Invariants:
// - Every job that was submitted is reported once, by drain() or wait(), and not before all its elements have ended.
// - close() returns when every job has ended. What was not reported before is still reported.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lmcache/mutex.h"
#include "lmcache/signal_masked_thread.h"
#include "lmcache/unique_fd.h"

namespace lmcache {

// Which jobs are taken first. Jobs of kIdle wait until no job of kNormal is under way or more than kPatientIdleJobs
// wait; they are not reported, and beyond kMaxIdleJobs the oldest are dropped.
enum class Lane : std::uint8_t { kFirst, kNormal, kIdle };

enum class Taken { kPiece, kNothing, kEnd };  // kEnd: nothing now and nothing ever

template <typename J>
class JobQueue;

// What every job has; jobs derive from it. The submitter fills it before submit().
template <typename R>
struct Job {
    using Results = R;

    std::size_t elements = 0;
    std::size_t piece = 1;  // elements that a thread takes at a time
    Lane lane = Lane::kNormal;
    std::uint64_t party = 0;  // whose job it is, for a queue that goes by turns
    Results results;  // what each element has is written by the thread that took it, and read when all have ended

private:
    template <typename J>
    friend class JobQueue;
    std::uint64_t number_ = 0;
    std::size_t next_ = 0;  // the first element that nobody has taken; guarded by the queue's mutex
    std::atomic<std::size_t> unfinished_{0};
};

// Thread-safe. An owner declares it behind everything that its threads use, so that they end first.
template <typename J>
class JobQueue {
public:
    using Results = typename J::Results;
    struct Completion {
        std::uint64_t job = 0;
        Results results;
    };
    struct Piece {
        std::shared_ptr<J> job;
        std::size_t begin = 0, end = 0;
    };

    static constexpr std::size_t kPatientIdleJobs = 64;
    static constexpr std::size_t kMaxIdleJobs = 1024;

    // `max_jobs`: running or not yet reported. `normal_is_polled`: jobs of Lane::kNormal are left to a thread that
    // calls poll() when wake() is readable. `by_turns`: pieces are taken of one party after the other, of each from its
    // oldest job, so that nobody waits for all that others have submitted; that takes time with the number of jobs.
    // Throws std::system_error.
    explicit JobQueue(std::size_t max_jobs, bool normal_is_polled = false, bool by_turns = false)
        : max_jobs_(max_jobs), by_turns_(by_turns) {
        if (normal_is_polled) wake_.emplace();
    }
    JobQueue(const JobQueue&) = delete;
    JobQueue& operator=(const JobQueue&) = delete;
    ~JobQueue() { close(); }

    // Threads that run `work`, which returns when take() is false; close() waits for them. Throws std::system_error.
    template <typename Work>
    void start_threads(std::size_t count, const char* name, const Work& work) {
        MutexLock lock(threads_mutex_);
        for (std::size_t i = 0; i < count; ++i) threads_.emplace_back(name, work);
    }

    // Readable exactly while drain() has something.
    int event_fd() const { return completed_.get(); }
    EventFd& wake() { return *wake_; }

    // Returns the number of the job; `accepted` is called before anybody can take it, as the last thing that may throw.
    // Throws std::invalid_argument after close() and with too many jobs. A job that was not submitted leaves no trace.
    template <typename Accepted>
    std::uint64_t submit(std::shared_ptr<J> job, const Accepted& accepted) {
        job->unfinished_.store(job->elements, std::memory_order_relaxed);
        const bool polled = wake_ && job->lane == Lane::kNormal;
        MutexLock lock(mutex_);
        if (closing_) throw std::invalid_argument("it is closed");
        if (running_.size() + completions_.size() >= max_jobs_)
            throw std::invalid_argument("more than " + std::to_string(max_jobs_) + " jobs are running or uncollected");
        const std::uint64_t number = job->number_ = ++last_number_;
        auto& waiting = lane(job->lane);
        waiting.push_back(job);
        try {
            running_.try_emplace(number);
            accepted();
        } catch (...) {  // without memory: the job was never there
            running_.erase(number);
            waiting.pop_back();
            throw;
        }
        if (job->lane == Lane::kNormal) ++normal_jobs_;
        if (job->elements == 0) {
            waiting.pop_back();
            complete(*job);
            return number;
        }
        lock.unlock();
        if (polled) {
            wake_->signal();
        } else {
            work_ready_.notify_one();
        }
        return number;
    }
    std::uint64_t submit(std::shared_ptr<J> job) {
        return submit(std::move(job), [] {});
    }

    // A job of Lane::kIdle with at least one element. Also after close(), from a thread that still calls take().
    void submit_idle(std::shared_ptr<J> job) {
        job->unfinished_.store(job->elements, std::memory_order_relaxed);
        MutexLock lock(mutex_);
        auto& idle = lane(Lane::kIdle);
        idle.push_back(std::move(job));
        if (idle.size() > kMaxIdleJobs) idle.pop_front();
        // Without polling the calling thread takes it next.
        if (wake_ && may_idle()) work_ready_.notify_one();
    }

    // Waits for a piece. False: closed, and nothing is left for this thread.
    bool take(Piece& piece) {
        piece.job.reset();
        MutexLock lock(mutex_);
        for (;;) {
            if (has_work()) {
                take_from(has(Lane::kFirst) ? Lane::kFirst : Lane::kNormal, piece);
                const bool has_more = has_work();
                lock.unlock();
                // Each thread wakes the next. Were all woken at once, two could be put on one core, because the
                // submitter still runs on the other, and stay there for most of a job.
                if (has_more) work_ready_.notify_one();
                return true;
            }
            if (has(Lane::kIdle) && may_idle()) {
                take_from(Lane::kIdle, piece);
                return true;
            }
            // Pieces that others still run were taken by them, and so are the idle jobs that may follow.
            if (closing_) return false;
            work_ready_.wait(mutex_);
        }
    }

    // A piece of Lane::kNormal, without waiting.
    Taken poll(Piece& piece) {
        MutexLock lock(mutex_);
        if (!has(Lane::kNormal)) return closing_ ? Taken::kEnd : Taken::kNothing;
        take_from(Lane::kNormal, piece);
        return Taken::kPiece;
    }

    // `count` elements of a job have ended. True: they were its last, and it is reported now.
    bool ended(J& job, std::size_t count = 1) noexcept {
        if (job.unfinished_.fetch_sub(count, std::memory_order_acq_rel) != count) return false;
        if (job.lane == Lane::kIdle) return true;
        MutexLock lock(mutex_);
        complete(job);
        return true;
    }

    std::vector<Completion> drain() {
        std::vector<Completion> reported;
        MutexLock lock(mutex_);
        reported.reserve(completions_.size());
        for (auto& [number, results] : completions_) reported.push_back({number, std::move(results)});
        completions_.clear();
        completed_.reset();
        return reported;
    }

    // Waits for one job; nullopt when it still runs after `timeout_seconds`. Throws std::invalid_argument for a job
    // that is unknown or was reported.
    std::optional<Results> wait(std::uint64_t job, double timeout_seconds) {
        constexpr double kLongestWaitSeconds = 1e6;
        const double bounded =
            std::isnan(timeout_seconds) ? 0.0 : std::clamp(timeout_seconds, 0.0, kLongestWaitSeconds);
        const auto deadline =
            std::chrono::steady_clock::now() +
            std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(bounded));
        MutexLock lock(mutex_);
        for (bool in_time = true;; in_time = job_completed_.wait_until(mutex_, deadline)) {
            if (auto node = completions_.extract(job)) {
                if (completions_.empty()) completed_.reset();
                return std::move(node.mapped());
            }
            if (!running_.contains(job))
                throw std::invalid_argument("job " + std::to_string(job) + " is unknown or was collected");
            if (!in_time) return std::nullopt;
        }
    }

    // Waits for everything submitted, then stops the threads. Idempotent.
    void close() {
        {
            MutexLock lock(mutex_);
            closing_ = true;
        }
        work_ready_.notify_all();
        if (wake_) wake_->signal();
        MutexLock lock(threads_mutex_);
        threads_.clear();
    }

private:
    std::deque<std::shared_ptr<J>>& lane(Lane lane) LMCACHE_REQUIRES(mutex_) {
        return lanes_[static_cast<std::size_t>(lane)];
    }
    bool has(Lane of) LMCACHE_REQUIRES(mutex_) { return !lane(of).empty(); }
    bool has_work() LMCACHE_REQUIRES(mutex_) { return has(Lane::kFirst) || (has(Lane::kNormal) && !wake_); }
    bool may_idle() LMCACHE_REQUIRES(mutex_) {
        return normal_jobs_ == 0 || lane(Lane::kIdle).size() > kPatientIdleJobs;
    }

    void take_from(Lane from, Piece& piece) LMCACHE_REQUIRES(mutex_) {
        auto& jobs = lane(from);
        const auto taken = by_turns_ ? next_in_turn(jobs) : jobs.begin();
        piece.job = *taken;
        J& job = *piece.job;
        piece.begin = job.next_;
        piece.end = job.next_ = std::min(job.next_ + job.piece, job.elements);
        if (piece.end == job.elements) jobs.erase(taken);
    }

    auto next_in_turn(std::deque<std::shared_ptr<J>>& jobs) LMCACHE_REQUIRES(mutex_) {
        // In a circle: the party that had the last turn is the furthest.
        const auto distance = [last = last_party_](const std::shared_ptr<J>& job) { return job->party - last - 1; };
        const auto next = std::min_element(jobs.begin(), jobs.end(), [&](const auto& left, const auto& right) {
            return distance(left) < distance(right);
        });
        last_party_ = (*next)->party;
        return next;
    }

    // Moves nodes of maps only, so that it cannot fail.
    void complete(J& job) noexcept LMCACHE_REQUIRES(mutex_) {
        if (job.lane == Lane::kNormal) --normal_jobs_;
        // With polling its threads may all sleep, and the poller takes no idle jobs.
        if (wake_ && has(Lane::kIdle) && may_idle()) work_ready_.notify_one();
        auto node = running_.extract(job.number_);
        node.mapped() = std::move(job.results);
        completions_.insert(std::move(node));
        completed_.signal();
        job_completed_.notify_all();
    }

    const std::size_t max_jobs_;
    const bool by_turns_;
    EventFd completed_;
    std::optional<EventFd> wake_;  // where Lane::kNormal is polled

    Mutex mutex_;
    Condition work_ready_, job_completed_;
    std::array<std::deque<std::shared_ptr<J>>, 3> lanes_ LMCACHE_GUARDED_BY(mutex_);  // with pieces not yet taken
    std::map<std::uint64_t, Results> running_ LMCACHE_GUARDED_BY(mutex_);             // by number
    std::map<std::uint64_t, Results> completions_ LMCACHE_GUARDED_BY(mutex_);
    std::uint64_t last_number_ LMCACHE_GUARDED_BY(mutex_) = 0;
    std::uint64_t last_party_ LMCACHE_GUARDED_BY(mutex_) = 0;  // that had a turn
    std::size_t normal_jobs_ LMCACHE_GUARDED_BY(mutex_) = 0;
    bool closing_ LMCACHE_GUARDED_BY(mutex_) = false;

    Mutex threads_mutex_;
    std::vector<SignalMaskedThread> threads_ LMCACHE_GUARDED_BY(threads_mutex_);
};

}  // namespace lmcache
