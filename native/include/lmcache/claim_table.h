// What owners hold for a time: leases and reservations. A claim is named by a number that is never used again, ends
// once, and is found by its owner. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace lmcache {

using Owner = std::int64_t;

struct Claim {
    Owner owner = 0;
    double deadline = 0;
};

template <typename T>  // derives from Claim
class ClaimTable {
public:
    std::uint64_t add(T claim) {
        const std::uint64_t id = ++last_id_;
        earliest_deadline_ = std::min(earliest_deadline_, claim.deadline);
        by_owner_[claim.owner].insert(id);
        claims_.emplace(id, std::move(claim));
        return id;
    }

    T* find(std::uint64_t id) {
        const auto found = claims_.find(id);
        return found == claims_.end() ? nullptr : &found->second;
    }

    // Ends the claim and hands it over. `id` must be in the table.
    T take(std::uint64_t id) {
        auto node = claims_.extract(id);
        const auto owned = by_owner_.find(node.mapped().owner);
        owned->second.erase(id);
        if (owned->second.empty()) by_owner_.erase(owned);
        return std::move(node.mapped());
    }

    // Oldest first.
    std::vector<std::uint64_t> of_owner(Owner owner) const {
        const auto owned = by_owner_.find(owner);
        if (owned == by_owner_.end()) return {};
        std::vector<std::uint64_t> ids(owned->second.begin(), owned->second.end());
        std::sort(ids.begin(), ids.end());
        return ids;
    }

    // Claims whose deadline is at or before `now`, oldest first.
    std::vector<std::uint64_t> expired(double now) {
        std::vector<std::uint64_t> ids;
        if (now < earliest_deadline_) return ids;
        earliest_deadline_ = std::numeric_limits<double>::infinity();
        for (const auto& [id, claim] : claims_) {
            if (claim.deadline <= now) {
                ids.push_back(id);
            } else {
                earliest_deadline_ = std::min(earliest_deadline_, claim.deadline);
            }
        }
        std::sort(ids.begin(), ids.end());
        return ids;
    }

    // To be called when a deadline has been moved, because `expired` looks no further while none can be due.
    void deadline_moved(double deadline) { earliest_deadline_ = std::min(earliest_deadline_, deadline); }

    std::size_t size() const { return claims_.size(); }
    auto begin() const { return claims_.begin(); }
    auto end() const { return claims_.end(); }

private:
    std::unordered_map<std::uint64_t, T> claims_;
    std::unordered_map<Owner, std::unordered_set<std::uint64_t>> by_owner_;
    std::uint64_t last_id_ = 0;
    double earliest_deadline_ = std::numeric_limits<double>::infinity();  // none is earlier
};

}  // namespace lmcache
