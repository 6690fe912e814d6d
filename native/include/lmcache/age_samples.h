// How old objects get, from a sample of the keys: time from store to eviction, from last use to eviction, and between
// uses. A key is in the sample or not as long as the process runs. Not thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lmcache {

inline double steady_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds.
struct Ages {
    std::vector<double> lifetimes;
    std::vector<double> idle_before_eviction;
    std::vector<double> reuse_gaps;
};

class AgeSamples {
public:
    explicit AgeSamples(double (*now)()) : now_(now) {}

    // From 0 (nothing) to 1 (every object).
    void set_rate(double rate) {
        constexpr double kHashes = 4294967296.0;
        threshold_ = static_cast<std::uint64_t>(rate * kHashes);
    }
    bool wants(std::uint64_t key_hash) const {
        // The key table and the ghosts use other bits.
        return (key_hash * 0x9E3779B97F4A7C15U) >> 32 < threshold_;
    }

    void stored(std::uint32_t index) {
        const double now = now_();
        objects_[index] = {now, now};
    }
    void used(std::uint32_t index) {
        const auto found = objects_.find(index);
        if (found == objects_.end()) return;
        const double now = now_();
        keep(ages_.reuse_gaps, now - found->second.last_use);
        found->second.last_use = now;
    }
    void evicted(std::uint32_t index) {
        const auto found = objects_.find(index);
        if (found == objects_.end()) return;
        const double now = now_();
        keep(ages_.lifetimes, now - found->second.stored);
        keep(ages_.idle_before_eviction, now - found->second.last_use);
    }
    void gone(std::uint32_t index) { objects_.erase(index); }

    // What was seen since the last call.
    Ages take() { return std::exchange(ages_, {}); }
    std::size_t memory_bytes() const {
        constexpr std::size_t kNodeOverheadBytes = 16;
        return objects_.size() * (sizeof(*objects_.begin()) + kNodeOverheadBytes) +
               objects_.bucket_count() * sizeof(void*);
    }

private:
    struct Times {
        double stored;
        double last_use;
    };
    static constexpr std::size_t kMostKept = 65536;  // of each kind, until they are taken

    static void keep(std::vector<double>& values, double value) {
        if (values.size() < kMostKept) values.push_back(value);
    }

    double (*now_)();
    std::uint64_t threshold_ = 0;
    std::unordered_map<std::uint32_t, Times> objects_;
    Ages ages_;
};

}  // namespace lmcache
