// A set of small numbers as bits, cheap to take the lowest from. Not thread-safe.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace lmcache {

class NumberSet {
public:
    static constexpr std::uint32_t kNone = ~std::uint32_t{0};

    // For numbers below `end`.
    explicit NumberSet(std::uint32_t end) : words_((std::size_t{end} + 63) / 64) {}

    std::size_t size() const { return size_; }
    bool contains(std::uint32_t number) const { return (words_[number / 64] >> (number % 64) & 1) != 0; }
    // Both without effect where there is nothing to do.
    void insert(std::uint32_t number) {
        if (contains(number)) return;
        words_[number / 64] |= std::uint64_t{1} << (number % 64);
        ++size_;
        if (number / 64 < first_word_) first_word_ = number / 64;
    }
    void erase(std::uint32_t number) {
        if (!contains(number)) return;
        words_[number / 64] &= ~(std::uint64_t{1} << (number % 64));
        --size_;
    }
    // The lowest that is at least `from`; kNone where there is none.
    std::uint32_t lowest(std::uint32_t from = 0) const {
        std::size_t at = from / 64;
        if (at < first_word_) at = first_word_;
        if (size_ == 0 || at >= words_.size()) return kNone;
        std::uint64_t word = words_[at];
        if (at == from / 64) word &= ~std::uint64_t{0} << (from % 64);
        while (word == 0) {
            if (++at == words_.size()) return kNone;
            word = words_[at];
        }
        return static_cast<std::uint32_t>(at * 64 + static_cast<std::size_t>(std::countr_zero(word)));
    }
    // The lowest, out of the set; kNone when it is empty.
    std::uint32_t take_lowest() {
        const std::uint32_t number = lowest();
        if (number == kNone) return kNone;
        first_word_ = number / 64;
        erase(number);
        return number;
    }

private:
    std::vector<std::uint64_t> words_;
    std::size_t size_ = 0;
    std::size_t first_word_ = 0;  // nothing is below
};

}  // namespace lmcache
