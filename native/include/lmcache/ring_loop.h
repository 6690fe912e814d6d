// The thread of an io_uring: keeps as many transfers under way as the depth allows, until there will be no more.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "lmcache/ring.h"

namespace lmcache {

// eventfd: one is added, everything is taken.
inline void add_event(int fd) {
    const std::uint64_t one = 1;
    while (::write(fd, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

inline void take_events(int fd) {
    std::uint64_t count;
    while (::read(fd, &count, sizeof count) < 0 && errno == EINTR) {
    }
}

enum class Taken { kStep, kNothing, kEnd };  // kEnd: nothing now and nothing ever

// `Source` gives the transfers; all calls come from this thread:
//   Source::Step                       one transfer, default-constructed and movable
//   Taken take(Step&)                  the next one, if any
//   bool begin(Step&)                  false when it has ended without a transfer
//   void start(Ring&, const Step&, std::uint64_t tag)   asks for what remains; the step stays where it is
//   bool absorb(Step&, std::int64_t result)             true when it has ended
// `wake_fd` is an eventfd that becomes readable when take() may have something new.
template <typename Source>
void run_ring(Ring& ring, unsigned depth, int wake_fd, Source& source) {
    constexpr std::uint64_t kWakeTag = ~std::uint64_t{0};
    std::vector<typename Source::Step> steps(depth);
    std::vector<std::size_t> idle(depth);
    for (std::size_t i = 0; i < depth; ++i) idle[i] = depth - 1 - i;
    bool listening = false;
    for (;;) {
        while (!idle.empty()) {
            auto& step = steps[idle.back()];
            const Taken taken = source.take(step);
            if (taken == Taken::kEnd && idle.size() == depth) return;
            if (taken != Taken::kStep) break;
            if (!source.begin(step)) {
                step = {};
                continue;
            }
            source.start(ring, step, idle.back());
            idle.pop_back();
        }
        if (!listening) {
            ring.poll_readable(wake_fd, kWakeTag);
            listening = true;
        }
        if (ring.submit_and_wait() != 0) std::abort();  // a defect of ours, never the disk's
        while (const auto completion = ring.pop()) {
            if (completion->tag == kWakeTag) {
                take_events(wake_fd);
                listening = false;
                continue;
            }
            const auto index = static_cast<std::size_t>(completion->tag);
            if (source.absorb(steps[index], completion->result)) {
                steps[index] = {};
                idle.push_back(index);
            } else {
                source.start(ring, steps[index], index);
            }
        }
    }
}

}  // namespace lmcache
