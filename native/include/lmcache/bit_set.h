// A set of small numbers as bits; taking the lowest is cheap. Not thread-safe.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace lmcache {

class BitSet {
public:
    static constexpr std::uint32_t kNone = ~std::uint32_t{0};

    // For numbers below `end`.
    explicit BitSet(std::uint32_t end) : words_((std::size_t{end} + 63) / 64) {}

    std::size_t size() const { return size_; }
    bool contains(std::uint32_t number) const { return (words_[number / 64] >> (number % 64) & 1) != 0; }
    // Both have no effect on a number that is, or is not, in the set already.
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
    // The lowest number that is at least `from`, or kNone.
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
    // Removes and returns the lowest number; kNone when the set is empty.
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
    std::size_t first_word_ = 0;  // words before it are zero
};

}  // namespace lmcache
