// Numbered pieces of work that several threads share.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

#include "lmcache/limits.h"

namespace lmcache {

// Calls `work(number)` once for each of `pieces`, in this thread and as many more as make `threads`, until one returns
// false: what was begun is then ended, and no more begun.
template <typename Work>
void share_pieces(std::size_t pieces, std::size_t threads, const Work& work) {
    std::atomic<std::size_t> next{0};
    std::atomic<bool> ended{false};
    const auto run = [&] {
        for (std::size_t number = next++; number < pieces && !ended; number = next++)
            if (!work(number)) ended = true;
    };
    std::vector<std::thread> others;
    const std::size_t wanted = std::min({threads, pieces, kMaxPrefaultThreads});
    for (std::size_t i = 1; i < wanted; ++i) others.emplace_back(run);
    run();
    for (std::thread& other : others) other.join();
}

}  // namespace lmcache
