// Numbered pieces of work that several threads share.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <system_error>
#include <vector>

#include "lmcache/limits.h"
#include "lmcache/signal_masked_thread.h"

namespace lmcache {

// Calls `work(number)` once for each number below `count`, in this thread and as many more as make `threads`, until one
// returns false: what was begun is then ended, and no more begun. Fewer threads, where the machine refuses one, do the
// same.
template <typename Work>
void parallel_for(std::size_t count, std::size_t threads, const Work& work) {
    std::atomic<std::size_t> next{0};
    std::atomic<bool> stopped{false};
    const auto run = [&] {
        for (std::size_t number = next++; number < count && !stopped; number = next++)
            if (!work(number)) stopped = true;
    };
    std::vector<SignalMaskedThread> helpers;
    const std::size_t wanted = std::min({threads, count, kMaxParallelThreads});
    try {
        while (helpers.size() + 1 < wanted) helpers.emplace_back("lmcache-worker", run);
    } catch (const std::system_error&) {
    }
    run();
}

}  // namespace lmcache
