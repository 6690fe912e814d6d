#include "lmcache/cachegen_stage.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "lmcache/rounding.h"

namespace lmcache {
namespace {

constexpr std::size_t kGroup = kCachegenGroupElements, kGroupBytes = 2 * kGroup, kBlockGroups = 256;
constexpr unsigned kMaxSymbols = 31;
constexpr std::uint32_t kBfloatInfinity = 0x7f80;
constexpr float kSmallestScaled = 0x1p-100F;  // a group below it becomes zeros: its inverse would overflow

// Range asymmetric numeral systems: states of 32 bits, words of 16, frequencies that sum up to 2^12. Several states in
// turn, whose steps do not wait for each other.
constexpr unsigned kFrequencyBits = 12, kWordBits = 16;
constexpr std::uint32_t kTotal = 1U << kFrequencyBits, kLowestState = 1U << kWordBits;
constexpr std::size_t kStates = 8;  // their symbols fill 64 bits
static_assert(kGroup % kStates == 0);

using Frequencies = std::array<std::uint16_t, kMaxSymbols>;
using Symbols = std::array<std::uint8_t, kBlockGroups * kGroup>;

// In front of each block's words.
struct BlockHeader {
    std::uint32_t words;
    std::array<std::uint32_t, kStates> states;  // with which a reader begins
};
static_assert(sizeof(BlockHeader) == 36);

struct Step {
    std::uint16_t scale;  // bfloat16: the largest magnitude, zero for a group of zeros
    float size;           // of one step
};

Step step_of(std::uint16_t scale, unsigned steps) {
    return {scale, std::bit_cast<float>(static_cast<std::uint32_t>(scale) << 16) / static_cast<float>(steps)};
}

// Returns the scale. `steps`: from zero to the largest magnitude.
std::uint16_t quantize(const std::byte* source, unsigned steps, std::uint8_t* symbols) {
    std::uint16_t elements[kGroup];
    std::memcpy(elements, source, sizeof elements);
    std::uint16_t largest = 0;
    for (const std::uint16_t element : elements) {
        const auto magnitude = static_cast<std::uint16_t>(element & 0x7fff);
        largest = largest < magnitude ? magnitude : largest;
    }
    const float value = std::bit_cast<float>(static_cast<std::uint32_t>(largest) << 16);
    if (value < kSmallestScaled) {
        std::memset(symbols, static_cast<int>(steps), kGroup);
        return 0;
    }
    const float inverse = static_cast<float>(steps) / value;
    const float magic = 0x1.8p23F;  // its last bit is worth one step
    const std::uint32_t zero = std::bit_cast<std::uint32_t>(magic) - steps;
    for (std::size_t i = 0; i < kGroup; ++i) {
        const float scaled = std::bit_cast<float>(static_cast<std::uint32_t>(elements[i]) << 16) * inverse;
        symbols[i] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(scaled + magic) - zero);
    }
    return largest;
}

void restore(const std::uint8_t* symbols, Step step, unsigned steps, std::byte* target) {
    std::uint16_t elements[kGroup];
    for (std::size_t i = 0; i < kGroup; ++i) {
        const float value = static_cast<float>(static_cast<int>(symbols[i]) - static_cast<int>(steps)) * step.size;
        const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
        elements[i] = static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
    }
    std::memcpy(target, elements, sizeof elements);
}

bool is_finite(std::span<const std::byte> source, std::size_t groups) {
    std::uint32_t infinite = 0;
    for (std::size_t i = 0; i < groups * kGroup; ++i) {
        std::uint16_t element;
        std::memcpy(&element, source.data() + 2 * i, sizeof element);
        infinite |= (element & kBfloatInfinity) == kBfloatInfinity ? 1U : 0U;
    }
    return infinite == 0;
}

// At least 1 for every symbol that occurs. `count` symbols, at least one.
Frequencies frequencies_of(const std::uint8_t* symbols, std::size_t count) {
    std::array<std::array<std::uint32_t, 32>, 4> counts{};  // in turn: the same symbol does not wait for itself
    for (std::size_t i = 0; i < count; i += 4) {
        for (std::size_t lane = 0; lane < 4; ++lane) ++counts[lane][symbols[i + lane]];
    }
    Frequencies frequencies{};
    std::uint32_t sum = 0;
    for (std::size_t symbol = 0; symbol < kMaxSymbols; ++symbol) {
        const std::uint64_t found =
            std::uint64_t{counts[0][symbol]} + counts[1][symbol] + counts[2][symbol] + counts[3][symbol];
        if (found == 0) continue;
        frequencies[symbol] = static_cast<std::uint16_t>(std::max<std::uint64_t>(1, found * kTotal / count));
        sum += frequencies[symbol];
    }
    // The commonest one has more than all roundings together.
    auto& commonest = *std::max_element(frequencies.begin(), frequencies.end());
    commonest = static_cast<std::uint16_t>(commonest + kTotal - sum);
    return frequencies;
}

// What a writer does with a symbol. A multiplication stands for the division by its frequency.
struct Coder {
    std::uint64_t reciprocal;  // of the frequency, times 2^64, rounded up
    std::uint64_t limit;       // a state from here on leaves a word behind first
    std::uint32_t complement, bias;
};
using Coders = std::array<Coder, 32>;

Coders coders_of(const Frequencies& frequencies) {
    Coders coders{};
    std::uint32_t start = 0;
    for (std::size_t symbol = 0; symbol < kMaxSymbols; ++symbol) {
        const std::uint32_t frequency = frequencies[symbol];
        if (frequency == 0) continue;
        // The reciprocal of 1 has no place: the largest number gives 1 too little, which the bias makes good.
        const bool is_once = frequency == 1;
        coders[symbol] = {is_once ? ~std::uint64_t{0} : ~std::uint64_t{0} / frequency + 1,
                          std::uint64_t{frequency} << (32 - kFrequencyBits), kTotal - frequency,
                          is_once ? start + kTotal - 1 : start};
        start += frequency;
    }
    return coders;
}

// Writes header, frequencies and words of a block. Returns the end.
std::byte* encode_block(const std::uint8_t* symbols, std::size_t count, unsigned kinds, std::byte* target) {
    thread_local std::array<std::uint16_t, kBlockGroups * kGroup + 1> words;
    const Frequencies frequencies = frequencies_of(symbols, count);
    const Coders coders = coders_of(frequencies);
    std::uint16_t* const end = words.data() + words.size();
    std::uint16_t* at = end;  // backwards: a reader goes the other way
    std::array<std::uint32_t, kStates> states;
    states.fill(kLowestState);
    for (std::size_t i = count; i != 0; i -= kStates) {
        for (std::size_t lane = kStates; lane-- > 0;) {
            const Coder& coder = coders[symbols[i - kStates + lane]];
            std::uint32_t state = states[lane];
            at[-1] = static_cast<std::uint16_t>(state);
            const std::uint32_t full = state >= coder.limit ? ~std::uint32_t{0} : 0;
            at -= full & 1U;
            state >>= full & kWordBits;
            __extension__ using Wide = unsigned __int128;
            const auto quotient = static_cast<std::uint32_t>(Wide{state} * coder.reciprocal >> 64);
            states[lane] = state + coder.bias + quotient * coder.complement;
        }
    }
    const BlockHeader header{static_cast<std::uint32_t>(end - at), states};
    std::memcpy(target, &header, sizeof header);
    target += sizeof header;
    std::memcpy(target, frequencies.data(), kinds * sizeof frequencies[0]);
    target += kinds * sizeof frequencies[0];
    std::memcpy(target, at, header.words * sizeof *at);
    return target + header.words * sizeof *at;
}

// What a reader does with the low bits of a state: symbol, frequency (13 bits) and offset (12 bits), in one word.
using Slots = std::array<std::uint32_t, kTotal>;
constexpr unsigned kOffsetBits = 12, kSymbolShift = 25;

bool fill(Slots& slots, const Frequencies& frequencies) {
    std::uint32_t start = 0;
    for (std::uint32_t symbol = 0; symbol < kMaxSymbols; ++symbol) {
        const std::uint32_t frequency = frequencies[symbol];
        if (frequency > kTotal - start) return false;
        const std::uint32_t first = symbol << kSymbolShift | frequency << kOffsetBits;
        for (std::uint32_t offset = 0; offset < frequency; ++offset) slots[start + offset] = first | offset;
        start += frequency;
    }
    return start == kTotal;
}

using States = std::array<std::uint32_t, kStates>;

// The next symbol of each state. Reads at most kStates words, and returns the first that it did not take.
[[gnu::always_inline]] inline const std::byte* decode_turn(const Slots& slots, States& states, const std::byte* words,
                                                           std::uint8_t* symbols) {
    std::uint64_t packed = 0;  // bytes that are written one by one could be anything, also a state
    for (std::size_t lane = 0; lane < kStates; ++lane) {
        const std::uint32_t slot = slots[states[lane] % kTotal];
        packed |= std::uint64_t{slot >> kSymbolShift} << 8 * lane;
        const std::uint32_t frequency = slot >> kOffsetBits & (2 * kTotal - 1), offset = slot % kTotal;
        const std::uint32_t state = frequency * (states[lane] >> kFrequencyBits) + offset;
        std::uint16_t word;
        std::memcpy(&word, words, sizeof word);
        // All ones where a word is due. Whether it is cannot be foreseen: a branch would cost more than all of this.
        const std::uint32_t due = state < kLowestState ? ~std::uint32_t{0} : 0;
        states[lane] = state << (due & kWordBits) | (word & due);
        words += due & sizeof word;
    }
    std::memcpy(symbols, &packed, sizeof packed);
    return words;
}

// Fills `symbols` with `count` ones below `kinds`. Returns how many bytes the block took, 0 for one that is none.
std::size_t decode_block(std::span<const std::byte> source, unsigned kinds, std::size_t count, std::uint8_t* symbols) {
    BlockHeader header;
    Frequencies frequencies{};
    const std::size_t front = sizeof header + kinds * sizeof frequencies[0];
    if (source.size() < front) return 0;
    std::memcpy(&header, source.data(), sizeof header);
    std::memcpy(frequencies.data(), source.data() + sizeof header, kinds * sizeof frequencies[0]);
    thread_local Slots filled;
    const Slots& slots = filled;
    if (header.words > (source.size() - front) / 2 || !fill(filled, frequencies)) return 0;
    constexpr std::size_t kTurnBytes = kStates * sizeof(std::uint16_t);
    const std::byte* at = source.data() + front;
    const std::byte* const end = at + 2 * std::size_t{header.words};
    States states = header.states;
    std::size_t i = 0;
    for (; i < count && static_cast<std::size_t>(end - at) >= kTurnBytes; i += kStates)
        at = decode_turn(slots, states, at, symbols + i);
    std::byte last[2 * kTurnBytes] = {};  // what is left, and zeros that no turn may take
    const auto left = static_cast<std::size_t>(end - at);
    std::size_t taken = 0;
    if (i < count) std::copy(at, end, last);
    for (; i < count && taken <= left; i += kStates)
        taken = static_cast<std::size_t>(decode_turn(slots, states, last + taken, symbols + i) - last);
    const bool is_whole =
        taken == left && std::ranges::all_of(states, [](auto state) { return state == kLowestState; });
    return is_whole ? front + 2 * std::size_t{header.words} : 0;
}

class CachegenStage final : public SerdeStage {
public:
    explicit CachegenStage(unsigned bins) : steps_(bins / 2 - 1), kinds_(2 * steps_ + 1) {}

    bool is_lossy() const override { return true; }

    std::size_t max_encoded_bytes(std::size_t source_bytes) const override {
        const std::size_t groups = source_bytes / kGroupBytes;
        const std::size_t blocks = div_ceil(groups, kBlockGroups);
        return source_bytes + 2 * groups + blocks * (sizeof(BlockHeader) + 2 * kinds_);  // at most a word an element
    }

    std::optional<std::size_t> encode(std::span<const std::byte> source, std::span<std::byte> destination,
                                      const SerdeObject&, std::vector<std::byte>&) const override {
        const std::size_t groups = source.size() / kGroupBytes;
        if (destination.size() < max_encoded_bytes(source.size()))
            throw std::invalid_argument("the destination of cachegen is too small");
        if (!is_finite(source, groups)) return std::nullopt;
        std::byte* const scales = destination.data();
        std::byte* to = scales + 2 * groups;
        thread_local Symbols symbols;
        for (std::size_t first = 0; first < groups; first += kBlockGroups) {
            const std::size_t count = std::min(kBlockGroups, groups - first);
            for (std::size_t i = 0; i < count; ++i) {
                const std::byte* const from = source.data() + (first + i) * kGroupBytes;
                const std::uint16_t scale = quantize(from, steps_, symbols.data() + i * kGroup);
                std::memcpy(scales + 2 * (first + i), &scale, sizeof scale);
            }
            to = encode_block(symbols.data(), count * kGroup, kinds_, to);
        }
        const std::size_t tail = source.size() % kGroupBytes;
        to = std::copy_n(source.end() - static_cast<std::ptrdiff_t>(tail), tail, to);
        return static_cast<std::size_t>(to - destination.data());
    }

    SerdeFault decode(std::span<const std::byte> source, std::span<std::byte> destination, const SerdeObject&,
                      std::span<const std::byte> parameters) const override {
        const std::size_t groups = destination.size() / kGroupBytes, tail = destination.size() % kGroupBytes;
        if (!parameters.empty() || source.size() < 2 * groups + tail) return SerdeFault::kCorrupt;
        const std::byte* const scales = source.data();
        std::span<const std::byte> blocks = source.subspan(2 * groups, source.size() - 2 * groups - tail);
        thread_local Symbols symbols;
        for (std::size_t first = 0; first < groups; first += kBlockGroups) {
            const std::size_t count = std::min(kBlockGroups, groups - first);
            const std::size_t taken = decode_block(blocks, kinds_, count * kGroup, symbols.data());
            if (taken == 0) return SerdeFault::kCorrupt;
            blocks = blocks.subspan(taken);
            for (std::size_t i = 0; i < count; ++i) {
                std::uint16_t scale;
                std::memcpy(&scale, scales + 2 * (first + i), sizeof scale);
                restore(symbols.data() + i * kGroup, step_of(scale, steps_), steps_,
                        destination.data() + (first + i) * kGroupBytes);
            }
        }
        if (!blocks.empty()) return SerdeFault::kCorrupt;
        std::copy_n(source.end() - static_cast<std::ptrdiff_t>(tail), tail,
                    destination.end() - static_cast<std::ptrdiff_t>(tail));
        return SerdeFault::kNone;
    }

private:
    const unsigned steps_;  // from zero to the largest magnitude
    const unsigned kinds_;  // of symbols: steps_ of each sign, and zero
};

}  // namespace

std::shared_ptr<const SerdeStage> make_cachegen_stage(unsigned bins) {
    if (bins != 16 && bins != 32) throw std::invalid_argument("bins must be 16 or 32");
    return std::make_shared<CachegenStage>(bins);
}

}  // namespace lmcache
