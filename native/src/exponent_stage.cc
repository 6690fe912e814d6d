#include "lmcache/exponent_stage.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "lmcache/rounding.h"

namespace lmcache {
namespace {

constexpr std::size_t kBlockElements = 16384;
constexpr std::size_t kSampledGroups = 16;  // of the groups of a block, one of so many is looked at
constexpr std::size_t kSampledBlocks = 8;   // of a payload
constexpr std::uint8_t kPlainBits = 8;      // width of exponents without codes

// In front of all blocks, one for each.
struct BlockHeader {
    std::uint8_t bits;  // of a code, or kPlainBits
    std::uint8_t zero;
    std::uint16_t escapes;
    std::uint8_t exponent_of[kMaxCodes];
};
static_assert(sizeof(BlockHeader) == 20);

// A payload of n bytes is blocks of kBlockElements, the last one shorter but in whole groups, and a tail.
struct Division {
    std::size_t elements, blocks, tail_bytes;

    explicit Division(std::size_t payload_bytes)
        : elements(payload_bytes / 2 / kGroupElements * kGroupElements),
          blocks(div_ceil(elements, kBlockElements)),
          tail_bytes(payload_bytes - 2 * elements) {}
    std::size_t block_elements(std::size_t block) const {
        return std::min(kBlockElements, elements - block * kBlockElements);
    }
};

void count(const std::uint8_t* exponents, std::size_t elements, std::size_t group_stride, ExponentSample& sample) {
    for (std::size_t at = 0; at < elements; at += group_stride * kGroupElements) {
        for (std::size_t i = 0; i < kGroupElements; ++i) ++sample.counts[exponents[at + i]];
        sample.total += kGroupElements;
    }
}

struct Ranking {
    std::uint8_t window_begin = 0;
    std::uint8_t exponents[kMaxCodes] = {};  // commonest first
    std::size_t found = 0;                   // at most kMaxCodes - 1
};

// The commonest exponents that a code table may have.
Ranking rank(const ExponentSample& sample) {
    const auto& counts = sample.counts;
    std::uint32_t inside = std::accumulate(counts, counts + kWindowExponents, 0U);
    std::uint32_t most = inside;
    Ranking ranking;
    for (std::size_t begin = 1; begin + kWindowExponents <= 256; ++begin) {
        inside += counts[begin + kWindowExponents - 1] - counts[begin - 1];
        if (inside > most) {
            most = inside;
            ranking.window_begin = static_cast<std::uint8_t>(begin);
        }
    }
    std::array<std::uint8_t, kWindowExponents + 1> candidates;
    std::size_t number = 0;
    if (ranking.window_begin != 0 && counts[0] != 0) candidates[number++] = 0;
    for (std::size_t i = 0; i < kWindowExponents; ++i) {
        const auto exponent = static_cast<std::uint8_t>(ranking.window_begin + i);
        if (counts[exponent] != 0) candidates[number++] = exponent;
    }
    ranking.found = std::min(number, kMaxCodes - 1);
    std::partial_sort(
        candidates.begin(), candidates.begin() + ranking.found, candidates.begin() + number,
        [&](std::uint8_t a, std::uint8_t b) { return counts[a] != counts[b] ? counts[a] > counts[b] : a < b; });
    std::copy_n(candidates.begin(), ranking.found, ranking.exponents);
    return ranking;
}

struct Width {
    unsigned bits = kPlainBits;
    double cost = kPlainBits;  // bits an exponent takes, escapes included
};

Width best_width(const ExponentSample& sample, const Ranking& ranking) {
    Width best;
    std::uint32_t covered = 0;
    std::size_t counted = 0;
    for (const unsigned bits : {2U, 3U, 4U}) {
        for (; counted < std::min<std::size_t>(ranking.found, (1U << bits) - 1); ++counted)
            covered += sample.counts[ranking.exponents[counted]];
        const double cost = bits + 8.0 * (sample.total - covered) / std::max(sample.total, 1U);
        if (cost < best.cost) best = {bits, cost};
    }
    return best;
}

CodeTable code_table(const Ranking& ranking, unsigned bits) {
    CodeTable table;
    table.bits = bits;
    table.window_begin = ranking.window_begin;
    const auto escape = static_cast<std::uint8_t>((1U << bits) - 1);
    std::memset(table.code_of, escape, sizeof table.code_of);
    std::memset(table.exponent_of, 0, sizeof table.exponent_of);
    for (std::uint8_t code = 0; code < std::min<std::size_t>(ranking.found, escape); ++code) {
        table.code_of[ranking.exponents[code]] = code;
        table.exponent_of[code] = ranking.exponents[code];
    }
    return table;
}

// What a block's exponents become.
struct PackedBlock {
    std::uint8_t exponents[kBlockElements + kSlackBytes];
    std::uint8_t planes[kBlockElements / 8 * kMaxCodeBits];
    std::uint8_t escapes[kBlockElements + kSlackBytes];
};
thread_local PackedBlock packed;

class ExponentStage final : public SerdeStage {
public:
    ExponentStage(double smallest_saving, const ExponentKernels& kernels)
        : smallest_saving_(smallest_saving), kernels_(kernels) {}

    std::size_t max_encoded_bytes(std::size_t source_bytes) const override {
        return source_bytes + Division(source_bytes).blocks * sizeof(BlockHeader);
    }

    std::optional<std::size_t> encode(std::span<const std::byte> source, std::span<std::byte> destination,
                                      const SerdeObject&, std::vector<std::byte>&) const override {
        if (!pays(source)) return std::nullopt;
        const Division division(source.size());
        std::size_t end = division.blocks * sizeof(BlockHeader);
        for (std::size_t block = 0; block < division.blocks; ++block) {
            BlockHeader header;
            end += encode_block(source.data() + 2 * block * kBlockElements, division.block_elements(block),
                                destination.data() + end, header);
            std::memcpy(destination.data() + block * sizeof header, &header, sizeof header);
        }
        std::memcpy(destination.data() + end, source.data() + 2 * division.elements, division.tail_bytes);
        end += division.tail_bytes;
        return end < source.size() ? std::optional(end) : std::nullopt;
    }

    SerdeFault decode(std::span<const std::byte> source, std::span<std::byte> destination, const SerdeObject&,
                      std::span<const std::byte>) const override {
        const Division division(destination.size());
        std::size_t at = division.blocks * sizeof(BlockHeader);
        if (source.size() < at + division.tail_bytes) return SerdeFault::kCorrupt;
        const std::size_t end = source.size() - division.tail_bytes;
        for (std::size_t block = 0; block < division.blocks; ++block) {
            const std::size_t elements = division.block_elements(block);
            BlockHeader header;
            std::memcpy(&header, source.data() + block * sizeof header, sizeof header);
            const bool is_plain = header.bits == kPlainBits;
            if (!is_plain && (header.bits < 2 || header.bits > kMaxCodeBits)) return SerdeFault::kCorrupt;
            const std::size_t block_bytes = elements + elements / 8 * header.bits + (is_plain ? 0 : header.escapes);
            if (block_bytes > end - at) return SerdeFault::kCorrupt;
            if (!decode_block(source.subspan(at, block_bytes), elements, header,
                              destination.data() + 2 * block * kBlockElements))
                return SerdeFault::kCorrupt;
            at += block_bytes;
        }
        if (at != end) return SerdeFault::kCorrupt;
        std::memcpy(destination.data() + 2 * division.elements, source.data() + end, division.tail_bytes);
        return SerdeFault::kNone;
    }

private:
    bool pays(std::span<const std::byte> source) const {
        const Division division(source.size());
        if (division.blocks == 0) return false;
        const std::size_t step = div_ceil(division.blocks, kSampledBlocks);
        double cost = 0;
        std::size_t sampled = 0;
        std::uint8_t rest[kGroupElements], exponents[kGroupElements];
        for (std::size_t block = 0; block < division.blocks; block += step, ++sampled) {
            ExponentSample sample;
            for (std::size_t i = 0; i < division.block_elements(block); i += kSampledGroups * kGroupElements) {
                kernels_.split(source.data() + 2 * (block * kBlockElements + i), 1, rest, exponents);
                count(exponents, kGroupElements, 1, sample);
            }
            cost += best_width(sample, rank(sample)).cost;
        }
        return cost <= static_cast<double>(sampled) * (8.0 - 16.0 * smallest_saving_);
    }

    // Writes at most two bytes an element.
    std::size_t encode_block(const std::byte* source, std::size_t elements, std::byte* destination,
                             BlockHeader& header) const {
        const std::size_t groups = elements / kGroupElements;
        header = {kPlainBits, 0, 0, {}};
        auto* const rest = reinterpret_cast<std::uint8_t*>(destination);
        kernels_.split(source, groups, rest, packed.exponents);
        ExponentSample sample;
        count(packed.exponents, elements, kSampledGroups, sample);
        const Ranking ranking = rank(sample);
        const unsigned bits = best_width(sample, ranking).bits;
        if (bits != kPlainBits) {
            const CodeTable table = code_table(ranking, bits);
            const std::size_t escapes = kernels_.pack(packed.exponents, groups, table, packed.planes, packed.escapes);
            const std::size_t plane_bytes = elements / 8 * bits;
            if (plane_bytes + escapes < elements) {  // the sample may have been wrong
                header.bits = static_cast<std::uint8_t>(bits);
                header.escapes = static_cast<std::uint16_t>(escapes);
                std::memcpy(header.exponent_of, table.exponent_of, sizeof header.exponent_of);
                std::memcpy(destination + elements, packed.planes, plane_bytes);
                std::memcpy(destination + elements + plane_bytes, packed.escapes, escapes);
                return elements + plane_bytes + escapes;
            }
        }
        std::memcpy(destination + elements, packed.exponents, elements);
        return 2 * elements;
    }

    bool decode_block(std::span<const std::byte> source, std::size_t elements, const BlockHeader& header,
                      std::byte* destination) const {
        const std::size_t groups = elements / kGroupElements;
        const auto* const rest = reinterpret_cast<const std::uint8_t*>(source.data());
        if (header.bits == kPlainBits) {
            kernels_.merge(rest, rest + elements, groups, destination);
            return true;
        }
        const std::uint8_t* const planes = rest + elements;
        const std::uint8_t* const escapes = planes + elements / 8 * header.bits;
        if (!kernels_.unpack(planes, groups, header.bits, header.exponent_of, escapes, header.escapes,
                             packed.exponents))
            return false;
        kernels_.merge(rest, packed.exponents, groups, destination);
        return true;
    }

    const double smallest_saving_;
    const ExponentKernels& kernels_;
};

}  // namespace

ExponentSample sample_exponents(std::span<const std::byte> payload, const ExponentKernels& kernels) {
    constexpr std::size_t kGroups = 1024;
    const std::size_t groups = payload.size() / 2 / kGroupElements;
    const std::size_t step = std::max<std::size_t>(1, groups / kGroups);
    ExponentSample sample;
    std::uint8_t rest[kGroupElements], exponents[kGroupElements];
    for (std::size_t group = 0; group < groups; group += step) {
        kernels.split(payload.data() + 2 * group * kGroupElements, 1, rest, exponents);
        count(exponents, kGroupElements, 1, sample);
    }
    return sample;
}

std::shared_ptr<const SerdeStage> make_exponent_stage(double smallest_saving, const ExponentKernels& kernels) {
    if (!(smallest_saving >= 0 && smallest_saving < 1))
        throw std::invalid_argument("smallest_saving must be at least 0 and below 1");
    return std::make_shared<ExponentStage>(smallest_saving, kernels);
}

}  // namespace lmcache
