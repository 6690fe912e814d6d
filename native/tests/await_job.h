// Waits for jobs of whatever reports completions by an eventfd.
#pragma once

#include <poll.h>

#include <cstdint>
#include <map>
#include <utility>

#include "check.h"

// The results of a job. Those of others that end meanwhile go to `others`, from which they are taken later.
template <class Source, class Results>
Results wait_for(Source& source, std::uint64_t job, std::map<std::uint64_t, Results>& others) {
    for (;;) {
        if (auto found = others.extract(job)) return std::move(found.mapped());
        pollfd ready{source.event_fd(), POLLIN, 0};
        CHECK(::poll(&ready, 1, 60'000) == 1);
        for (auto& [number, results] : source.drain()) others[number] = std::move(results);
    }
}

template <class Source>
auto wait_for(Source& source, std::uint64_t job) {
    std::map<std::uint64_t, decltype(source.drain().front().results)> others;
    return wait_for(source, job, others);
}
