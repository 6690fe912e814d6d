// Small integers, each with how full it is, the fullest first. A binary heap in which every number knows its place, so
// that one can be moved or taken out. Not thread-safe.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace lmcache {

// How much of a limit is taken; of those without a limit the largest is the fullest.
struct Fullness {
    double part = 0;
    std::uint64_t units = 0;

    static Fullness of(std::uint64_t units, std::uint64_t limit_units) {
        const double part = limit_units == 0 ? std::numeric_limits<double>::infinity()
                                             : static_cast<double>(units) / static_cast<double>(limit_units);
        return {part, units};
    }
    auto operator<=>(const Fullness&) const = default;
};

class FullestFirst {
public:
    bool empty() const { return heap_.empty(); }
    std::uint32_t top() const { return heap_.front().number; }

    // Enters the number, or moves it.
    void put(std::uint32_t number, const Fullness& fullness) {
        if (number >= places_.size()) places_.resize(std::size_t{number} + 1, kNowhere);
        if (places_[number] == kNowhere) {
            places_[number] = heap_.size();
            heap_.push_back({fullness, number});
        } else {
            heap_[places_[number]].fullness = fullness;
        }
        settle(places_[number]);
    }

    // Nothing where it is not in.
    void remove(std::uint32_t number) {
        if (number >= places_.size() || places_[number] == kNowhere) return;
        const std::size_t place = std::exchange(places_[number], kNowhere);
        const Entry last = heap_.back();
        heap_.pop_back();
        if (last.number == number) return;
        heap_[place] = last;
        places_[last.number] = place;
        settle(place);
    }

    // Those that are fuller, in any order, without looking at the others.
    std::vector<std::uint32_t> fuller_than(const Fullness& fullness) const {
        std::vector<std::uint32_t> numbers;
        std::vector<std::size_t> places{0};
        while (!places.empty()) {
            const std::size_t place = places.back();
            places.pop_back();
            if (place >= heap_.size() || !(fullness < heap_[place].fullness)) continue;
            numbers.push_back(heap_[place].number);
            places.push_back(2 * place + 1);
            places.push_back(2 * place + 2);
        }
        return numbers;
    }

    bool contains(std::uint32_t number) const { return number < places_.size() && places_[number] != kNowhere; }
    std::size_t memory_bytes() const {
        return heap_.capacity() * sizeof(Entry) + places_.capacity() * sizeof(std::size_t);
    }

private:
    static constexpr std::size_t kNowhere = ~std::size_t{0};
    struct Entry {
        Fullness fullness;
        std::uint32_t number;
    };

    bool is_fuller(std::size_t a, std::size_t b) const { return heap_[b].fullness < heap_[a].fullness; }
    void swap(std::size_t a, std::size_t b) {
        std::swap(heap_[a], heap_[b]);
        places_[heap_[a].number] = a;
        places_[heap_[b].number] = b;
    }
    // Up or down to where it belongs.
    void settle(std::size_t place) {
        for (; place != 0 && is_fuller(place, (place - 1) / 2); place = (place - 1) / 2) swap(place, (place - 1) / 2);
        while (true) {
            std::size_t child = 2 * place + 1;
            if (child >= heap_.size()) return;
            if (child + 1 < heap_.size() && is_fuller(child + 1, child)) ++child;
            if (!is_fuller(child, place)) return;
            swap(place, child);
            place = child;
        }
    }

    std::vector<Entry> heap_;
    std::vector<std::size_t> places_;  // by number
};

}  // namespace lmcache
