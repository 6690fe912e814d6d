// Brings transfers to their end: one on the calling thread, or many at once on an io_uring.
//
// A Step is one transfer, default-constructible and movable:
//   std::optional<IoOutcome> begin()                   the outcome when it has ended already
//   std::int64_t move()                                a system call; bytes, or -errno
//   void start(IoUring&, std::uint64_t tag) const      asks the ring for the same; the step stays where it is
//   std::optional<IoOutcome> absorb(std::int64_t)      takes in what either gave; the outcome when it has ended
// A Source gives them, to one thread:
//   Taken take(Step&)
//   void end(Step&, IoOutcome)
#pragma once

#include <cstdint>
#include <cstdlib>
#include <future>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "lmcache/io_uring.h"
#include "lmcache/job_queue.h"

namespace lmcache {

struct IoOutcome {
    std::int64_t value = 0;  // -1 for a failure
    std::int32_t error = 0;  // errno of a failure
};

inline IoOutcome io_failure(int error) { return {-1, error}; }

// The two halves of the outcome of each element of a job.
struct IoResults {
    std::vector<std::int64_t> values;
    std::vector<std::int32_t> errors;

    void resize(std::size_t count) {
        values.resize(count);
        errors.resize(count);
    }
    void set(std::size_t index, IoOutcome outcome) {
        values[index] = outcome.value;
        errors[index] = outcome.error;
    }
};

template <typename Step>
IoOutcome run_to_end(Step& step) {
    std::optional<IoOutcome> outcome = step.begin();
    while (!outcome) outcome = step.absorb(step.move());
    return *outcome;
}

// Keeps as many transfers under way as the depth allows, until there will be no more. `wake` is readable when
// source.take() may have something new.
template <typename Step, typename Source>
void run_io_uring(IoUring& ring, unsigned depth, EventFd& wake, Source& source) {
    constexpr std::uint64_t kWakeTag = ~std::uint64_t{0};
    std::vector<Step> steps(depth);
    std::vector<std::size_t> idle(depth);
    for (std::size_t i = 0; i < depth; ++i) idle[i] = depth - 1 - i;
    bool listening = false;
    for (;;) {
        while (!idle.empty()) {
            Step& step = steps[idle.back()];
            const Taken taken = source.take(step);
            if (taken == Taken::kEnd && idle.size() == depth) return;
            if (taken != Taken::kPiece) break;
            if (const auto outcome = step.begin()) {
                source.end(step, *outcome);
                step = {};
                continue;
            }
            step.start(ring, idle.back());
            idle.pop_back();
        }
        if (!listening) {
            ring.poll_readable(wake.get(), kWakeTag);
            listening = true;
        }
        if (ring.submit_and_wait() != 0) std::abort();  // a defect of ours, never the disk's
        while (const auto completion = ring.pop()) {
            if (completion->tag == kWakeTag) {
                wake.reset();
                listening = false;
                continue;
            }
            const auto index = static_cast<std::size_t>(completion->tag);
            Step& step = steps[index];
            if (const auto outcome = step.absorb(completion->result)) {
                source.end(step, *outcome);
                step = {};
                idle.push_back(index);
            } else {
                step.start(ring, index);
            }
        }
    }
}

// Starts the thread that polls a queue for an io_uring; `finally` is called at its end. Throws std::system_error where
// io_uring is refused.
template <typename Step, typename Queue, typename Source, typename Finally>
void start_io_uring(Queue& queue, unsigned depth, Source source, const Finally& finally) {
    const auto created = std::make_shared<std::promise<int>>();  // a ring belongs to the thread that made it
    queue.start_threads(1, "lmcache-uring", [&queue, depth, source, finally, created]() mutable {
        int error = 0;
        const auto ring = IoUring::create(depth + 1, error);  // one more, to be woken
        created->set_value(ring ? 0 : error);
        if (!ring) return;
        run_io_uring<Step>(*ring, depth, queue.wake(), source);
        finally();
    });
    if (const int error = created->get_future().get(); error != 0)
        throw std::system_error(error, std::generic_category(), "io_uring");
}

}  // namespace lmcache
